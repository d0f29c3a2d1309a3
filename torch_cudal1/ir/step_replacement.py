"""Puts other steps in the place of single steps of a Program, and gives a result the layout that
the steps behind it expect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from torch_cudal1.ir.program import Arg, Aten, Program, Step, TensorSpec, Value, renumber_step

__all__ = ["MakeSteps", "make_restoring_steps", "replace_steps"]

# From the numbers that values have now, and the first free one, steps of which the last one's first
# result takes the place of the replaced step's; None where there are none.
MakeSteps: TypeAlias = Callable[[Mapping[int, int], int], Sequence[Step] | None]

_PERMUTE, _CLONE = "aten.permute.default", "aten.clone.default"


def replace_steps(program: Program, replacements: Mapping[int, MakeSteps]) -> Program | None:
    """`program` with other steps at the positions of `replacements`; None where one has none."""
    numbers = {index: index for index in range(len(program.inputs) + len(program.constants))}
    steps: list[Step] = []
    upcoming = len(numbers)
    for position, step in enumerate(program.steps):
        if position in replacements:
            new_steps = replacements[position](numbers, upcoming)
            if new_steps is None:
                return None
            steps += new_steps
            upcoming += sum(len(each.writes) for each in new_steps)
            numbers[step.writes[0]] = new_steps[-1].writes[0]
            continue
        outs = tuple(range(upcoming, upcoming + len(step.writes)))
        steps.append(renumber_step(step, numbers, outs))
        numbers.update(zip(step.writes, outs, strict=True))
        upcoming += len(outs)
    outputs = tuple(None if index is None else numbers[index] for index in program.outputs)
    return replace(program, steps=tuple(steps), outputs=outputs)


def make_restoring_steps(value: int, first: int, out: TensorSpec) -> list[Step] | None:
    """Steps that give `value`, of the shape of `out`, its layout too, numbered from `first` on;
    None where that is no layout that a copy has.

    As a copy in the order of the dimensions in memory: Inductor fuses it with what reads it, or
    leaves it out where the layout is the same.
    """
    order = tuple(sorted(range(len(out.shape)), key=lambda i: (-out.strides[i], i)))
    dense = 1
    for dimension in reversed(order):
        if out.shape[dimension] > 1 and out.strides[dimension] != dense:
            return None
        dense *= out.shape[dimension]
    back = tuple(order.index(dimension) for dimension in range(len(order)))
    contiguous: tuple[tuple[str, Arg], ...] = (("memory_format", torch.contiguous_format),)
    parts: tuple[tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]], ...] = (
        (_PERMUTE, (order,), ()),
        (_CLONE, (), contiguous),
        (_PERMUTE, (back,), ()),
    )
    steps: list[Step] = []
    for name, args, kwargs in parts:
        steps.append(Aten(name, (Value(value), *args), kwargs, (first,)))
        value, first = first, first + 1
    return steps
