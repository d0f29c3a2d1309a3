"""What the outputs of a Program are, before it runs: their form, and whose memory they are.

Worked out on fake tensors, whose views share storage as real ones do. `contract` compares a
candidate's outputs with its reference's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_cudal1.ir.interpreter import interpret, skip_launch
from torch_cudal1.ir.program import Alloc, Program, TensorSpec

__all__ = ["OutputOutline", "find_difference", "outline_outputs"]


@dataclass(frozen=True)
class OutputOutline:
    """Form of one output, and whose memory it is: inputs and outputs it shares, a constant's, or an
    Alloc's.
    """

    spec: TensorSpec
    inputs: frozenset[int]
    outputs: frozenset[int]
    constant: bool
    alloc: bool


def find_difference(actual: OutputOutline, expected: OutputOutline) -> str:
    spec, expected_spec = actual.spec, expected.spec
    if (spec.dtype, spec.shape, spec.device) != (
        expected_spec.dtype,
        expected_spec.shape,
        expected_spec.device,
    ):
        form = f"{expected_spec.dtype}{list(expected_spec.shape)} on {expected_spec.device}"
        return f"is {spec.dtype}{list(spec.shape)} on {spec.device}, expected {form}"
    # The strides of an Alloc are the candidate's own choice; those of operators are compared on
    # real results (`fresh_output`).
    if actual.alloc and _list_relevant_strides(spec) != _list_relevant_strides(expected_spec):
        return f"is allocated with strides {list(spec.strides)}, expected {list(expected_spec.strides)}"
    # A caller that writes into such a result would change the next one.
    if actual.constant and not expected.constant:
        return "is memory of a constant, which outlives the call"
    # Eager may return views of its inputs: there a candidate may too.
    if actual.inputs - expected.inputs:
        return f"is memory of input {min(actual.inputs - expected.inputs)}, eager's is not"
    if actual.outputs - expected.outputs:
        return (
            f"shares memory with output {min(actual.outputs - expected.outputs)}, eager's does not"
        )
    return ""


def _list_relevant_strides(spec: TensorSpec) -> tuple[int, ...]:
    """Strides of the dimensions that have one: those of length 0 and 1 do not matter."""
    return (
        tuple(s for n, s in zip(spec.shape, spec.strides, strict=True) if n > 1)
        if spec.numel
        else ()
    )


def outline_outputs(program: Program) -> tuple[OutputOutline | None, ...]:
    """Worked out on fake tensors, whose views share storage as real ones do; constants stand as
    further inputs.
    """
    specs = (
        *program.inputs,
        *(TensorSpec.of(program.payloads[name]) for name in program.constants),
    )
    count = len(specs) + sum(len(step.writes) for step in program.steps)
    # Constants become inputs, so that their memory is told apart from what a call allocates.
    opened = replace(program, inputs=specs, constants=(), outputs=tuple(range(count)))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        inputs = [
            torch.empty_strided(s.shape, s.strides, dtype=s.torch_dtype, device=s.device)
            for s in specs
        ]
        # Machine code cannot run on fake tensors; a launch changes no form.
        values = interpret(opened, torch.device(program.device), launcher=skip_launch)(inputs)
        # fused attention yields numbers beside its tensors, for its backward
        memory = [
            # Views share their storage's address, in fake mode as well.
            value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
            for value in values
        ]
    allocs = {memory[step.out] for step in program.steps if isinstance(step, Alloc)}
    first = len(program.inputs)

    def describe(position: int, index: int) -> OutputOutline:
        storage, value = memory[index], values[index]
        assert value is not None
        shared_inputs = frozenset(i for i in range(first) if memory[i] == storage)
        outputs = frozenset(
            i
            for i, other in enumerate(program.outputs)
            if other is not None and i != position and memory[other] == storage
        )
        return OutputOutline(
            TensorSpec.of(value),
            shared_inputs,
            outputs,
            storage in memory[first : len(specs)],
            storage in allocs,
        )

    return tuple(
        None if index is None else describe(position, index)
        for position, index in enumerate(program.outputs)
    )
