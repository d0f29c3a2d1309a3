"""dtype, shape and strides of what a Program computes, worked out on fake tensors: nothing is
launched or allocated.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_cudal1.ir.interpreter import interpret, skip_launch
from torch_cudal1.ir.program import Program, TensorSpec

__all__ = ["find_unaligned_values", "output_specs", "value_specs"]

# The latest results by digest: a start asks three times about one Program of a whole model, and each
# fake run of 500 steps takes 0.1 s.
_latest_specs: OrderedDict[str, dict[int, TensorSpec]] = OrderedDict()
_MAX_LATEST = 16


def output_specs(program: Program) -> list[TensorSpec | None]:
    """dtype, shape and strides of every output, computed on fake tensors. Nothing is launched or
    allocated.
    """
    # Constants are real tensors, which the mode would otherwise refuse.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return [
            TensorSpec.of(out) if isinstance(out, torch.Tensor) else None
            for out in _fake_run(program)
        ]


def value_specs(program: Program) -> dict[int, TensorSpec]:
    """dtype, shape and strides of every value that is a tensor: inputs, constants and steps'
    results, on fake tensors.
    """
    # With all values as outputs none is released at its last use. Which ones the Program hands out
    # changes nothing.
    all_outputs = replace(program, outputs=tuple(range(program.value_count)))
    digest = all_outputs.digest
    specs = _latest_specs.get(digest)
    if specs is None:
        specs = {i: spec for i, spec in enumerate(output_specs(all_outputs)) if spec is not None}
        _latest_specs[digest] = specs
        while len(_latest_specs) > _MAX_LATEST:
            _latest_specs.popitem(last=False)
    # A copy, since the caller may add what it computes.
    return dict(specs)


def find_unaligned_values(program: Program, alignment: int) -> frozenset[int]:
    """Values that are views whose first element is no multiple of `alignment` bytes behind the
    start of their storage.
    """
    all_outputs = replace(program, outputs=tuple(range(program.value_count)))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        values = enumerate(_fake_run(all_outputs))
        return frozenset(
            i
            for i, t in values
            # PyTorch's allocators align the start of a storage, so the offset into it decides. A
            # kernel that assumes alignment cannot run on such a view.
            if isinstance(t, torch.Tensor) and t.storage_offset() * t.element_size() % alignment
        )


def _fake_run(program: Program) -> list[torch.Tensor | None]:
    device = torch.device(program.device)
    inputs = [
        torch.empty_strided(s.shape, s.strides, dtype=s.torch_dtype, device=s.device)
        for s in program.inputs
    ]
    return interpret(program, device, launcher=skip_launch)(inputs)
