"""Gives the values that pass from block to block the layout that a compiler would give them.

Eager keeps the layout of the first operand: where a convolution's channels became the last dimension
by a permutation, every residual sum of the layers behind it is permuted in memory too. Inductor,
which sees the whole, lays such sums out as they are read. Cut into blocks, they would keep eager's
strides at every cut. So a copy in the plain layout is made before the first block, which Inductor
fuses into the kernel that makes the value.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from torch_cudal1.ir.program import Aten, Program, Step, TensorSpec, Value, renumber_step

__all__ = ["insert_contiguous_copies", "is_permuted"]

_CLONE = "aten.clone.default"
# Steps whose result depends on strides.
_READS_STRIDES = {"aten.as_strided.default", "aten.as_strided_scatter.default"}


def is_permuted(spec: TensorSpec) -> bool:
    """Whether a tensor is dense, with its dimensions in another order in memory than in its shape."""
    dimensions = [
        (stride, size) for stride, size in zip(spec.strides, spec.shape, strict=True) if size > 1
    ]
    expected, dense = 1, sorted(dimensions)
    for stride, size in dense:
        if stride != expected:
            return False
        expected *= size
    return [stride for stride, _ in dimensions] != [stride for stride, _ in reversed(dense)]


def insert_contiguous_copies(program: Program, values: Collection[int]) -> Program | None:
    """`program` with a contiguous copy of each of `values` in its place for all later steps; None
    where a step depends on strides. The Program's outputs stay as they are.
    """
    if _READS_STRIDES & {step.target for step in program.steps if isinstance(step, Aten)}:
        return None
    numbers = {index: index for index in range(len(program.inputs) + len(program.constants))}
    # What the outputs name: not the copies, whose strides differ.
    originals = dict(numbers)
    steps: list[Step] = []
    upcoming = len(numbers)
    for step in program.steps:
        outs = tuple(range(upcoming, upcoming + len(step.writes)))
        steps.append(renumber_step(step, numbers, outs))
        upcoming += len(outs)
        for value, number in zip(step.writes, outs, strict=True):
            numbers[value] = originals[value] = number
            if value in values:
                steps.append(_make_copy(number, upcoming))
                numbers[value] = upcoming
                upcoming += 1
    outputs = tuple(None if index is None else originals[index] for index in program.outputs)
    return replace(program, steps=tuple(steps), outputs=outputs)


def _make_copy(value: int, out: int) -> Aten:
    kwargs = (("memory_format", torch.contiguous_format),)
    return Aten(_CLONE, (Value(value),), kwargs, (out,), False)
