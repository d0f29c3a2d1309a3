"""dtype, shape and strides of what a Program computes, worked out on fake tensors: nothing is
launched or allocated.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_cudal1.ir.interpreter import interpret, skip_launch
from torch_cudal1.ir.program import Program, TensorSpec

__all__ = ["find_unaligned_values", "output_specs", "value_specs"]


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
    value_count = program.value_count
    # As outputs no value is released at its last use.
    all_outputs = replace(program, outputs=tuple(range(value_count)))
    return {index: spec for index, spec in enumerate(output_specs(all_outputs)) if spec is not None}


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
