"""dtype, shape and strides of what a Program computes, worked out on fake tensors: nothing is
launched or allocated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.interpreter import interpret, interpret_steps, skip_launch
from torch_cudal1.ir.program import Alloc, Aten, Launch, Program, Step, TensorSpec, renumber_step

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
        specs = _compute_step_by_step(program) or {
            i: spec for i, spec in enumerate(output_specs(all_outputs)) if spec is not None
        }
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


def _compute_step_by_step(program: Program) -> dict[int, TensorSpec] | None:
    """All specs, with steps that are equal and have equal operands worked out once: of the layers of
    a model one is. None where that is not enough to know them.
    """
    check_program(program)
    device = torch.device(program.device)
    known: dict[Any, list[TensorSpec | None]] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        values: list[TensorSpec | None] = [
            *program.inputs,
            *(TensorSpec.of(program.payloads[name].to(device)) for name in program.constants),
        ]
        for step in program.steps:
            if isinstance(step, Aten):
                numbers = {index: i for i, index in enumerate(dict.fromkeys(step.reads))}
                operands = [spec for index in numbers if (spec := values[index]) is not None]
                # What is no tensor has no spec; a view of complex numbers may be conjugated, which
                # none tells.
                is_told = not any(spec.dtype.startswith("complex") for spec in operands)
                if len(operands) < len(numbers) or not is_told:
                    return None
                outs = tuple(range(len(numbers), len(numbers) + len(step.outs)))
                alone = renumber_step(step, numbers, outs)
                # As text: 1, 1.0 and True are equal, and make results of different types.
                key = (repr(alone), tuple(operands))
                if key not in known:
                    try:
                        known[key] = _run_step(alone, operands, device)
                    # What the values of a constant decide is known to the whole run only.
                    except RuntimeError:
                        return None
                values += known[key]
            elif isinstance(step, Alloc):
                values.append(replace(step.spec, device=device.type))
            elif not isinstance(step, Launch):
                return None
    return {index: spec for index, spec in enumerate(values) if spec is not None}


def _run_step(
    step: Step, operands: Sequence[TensorSpec], device: torch.device
) -> list[TensorSpec | None]:
    program = Program(tuple(operands), (step,), step.writes)
    run = interpret_steps(program, program.steps, device, skip_launch)
    results = run([_make_fake(spec) for spec in operands])
    return [TensorSpec.of(out) if isinstance(out, torch.Tensor) else None for out in results]


def _make_fake(spec: TensorSpec) -> torch.Tensor:
    """A tensor of this form, in a FakeTensorMode."""
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.torch_dtype, device=spec.device)


def _fake_run(program: Program) -> list[torch.Tensor | None]:
    device = torch.device(program.device)
    inputs = [_make_fake(spec) for spec in program.inputs]
    return interpret(program, device, launcher=skip_launch)(inputs)
