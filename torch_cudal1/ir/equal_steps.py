"""Merges steps of a Program that compute the same of the same values (common subexpressions).

A mask that every layer of a model derives from one tensor is derived once. Inductor does this to the
graphs that it compiles; whoever cuts a Program into parts has to do it before.
"""

from __future__ import annotations

from dataclasses import replace

from torch_cudal1.ir.aliasing import may_return_operand
from torch_cudal1.ir.aten import is_random
from torch_cudal1.ir.program import Aten, Program, Step, renumber_step

__all__ = ["merge_equal_steps"]


def merge_equal_steps(program: Program) -> Program:
    """`program` with the first of equal ATen steps in place of all of them. What the caller may hold
    stays its own tensor: a step is left alone if its memory is that of an output.
    """
    held_values = _find_held_values(program)
    numbers = {index: index for index in range(len(program.inputs) + len(program.constants))}
    outs_of_form: dict[str, tuple[int, ...]] = {}
    steps: list[Step] = []
    upcoming = len(numbers)
    for step in program.steps:
        outs = tuple(range(upcoming, upcoming + len(step.writes)))
        renumbered = renumber_step(step, numbers, outs)
        if (
            isinstance(renumbered, Aten)
            and _may_be_merged(renumbered)
            and held_values.isdisjoint(step.writes)
        ):
            # By its text: 1, 1.0 and True are equal, and compute different things.
            form = repr(replace(renumbered, outs=()))
            if form in outs_of_form:
                numbers.update(zip(step.writes, outs_of_form[form], strict=True))
                continue
            outs_of_form[form] = outs
        numbers.update(zip(step.writes, outs, strict=True))
        steps.append(renumbered)
        upcoming += len(outs)
    outputs = tuple(None if index is None else numbers[index] for index in program.outputs)
    return replace(program, steps=tuple(steps), outputs=outputs)


def _may_be_merged(step: Aten) -> bool:
    return not is_random(step.target, step.args, dict(step.kwargs))


def _find_held_values(program: Program) -> frozenset[int]:
    """Outputs, and the values whose memory an output may share."""
    memory_owners = {index for index in program.outputs if index is not None}
    for step in reversed(program.steps):
        if not memory_owners.isdisjoint(step.writes) and may_return_operand(step):
            memory_owners.update(step.reads)
    return frozenset(memory_owners)
