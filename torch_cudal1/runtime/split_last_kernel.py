"""Splits the step that yields a Program's results from the steps before it, so that it can run
after a CUDA graph of the others.

A graph writes where it was captured, so its results are copied out: for 64 MiB that takes 15 us on
an H200, and the logits of a language model may be 300. A last step that runs after the graph writes
to fresh memory itself, and the host launches it while the graph still runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_cudal1.ir.aliasing import ValueOrigins, makes_fresh_memory, may_return_operand
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.program import (
    Alloc,
    Aten,
    Call,
    Launch,
    Program,
    Step,
    TensorSpec,
    renumber_steps,
)
from torch_cudal1.ir.value_specs import value_specs

__all__ = ["MIN_SPLIT_BYTES", "SplitProgram", "SplitRunner", "split_last_step"]

# Of a result. Up to this size its copy is a small kernel inside the graph (most_by_kernel in
# csrc/captured.h).
MIN_SPLIT_BYTES = 4 << 20
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
# What Inductor leaves to a library: nothing before such a step is fused into it.
_LIBRARY_CALLS = (*_PRODUCTS, "aten.convolution.default")
# Inductor pads a product's operands to a multiple of it where that is faster (`pad_mm`).
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class SplitProgram:
    """A Program in two parts.

    `first` has the Program's inputs and yields the values that `last` reads of it. `last` takes
    these values, then the inputs, and yields the Program's outputs, all of them in memory that it
    made itself. `may_be_padded`: `last` is a product whose operands Inductor may pad, so where it
    compiles `first` it should compile `last` too, by itself.
    """

    first: Program
    last: Program
    may_be_padded: bool = False


@dataclass(frozen=True)
class SplitRunner:
    """The parts of a Program as callables, and a callable of both: a graph is captured of the first
    alone.
    """

    first: Runner
    last: Runner

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """What the Program yields."""
        # A first part yields tensors only, never None.
        return self.last([*self.first(inputs), *inputs])  # type: ignore[list-item]


def split_last_step(program: Program, *, is_fused: bool = False) -> SplitProgram | None:
    """The Program in two parts. None unless its last step, with views of its results, yields all
    outputs, and one of them has MIN_SPLIT_BYTES or more.

    `is_fused`: the first part will be compiled; None then where the last step could be fused into
    it.
    """
    cut = _find_cut(program)
    if cut is None:
        return None
    specs = value_specs(program)
    if is_fused and not _stands_alone(program.steps[cut]):
        return None
    steps, makers = program.steps, ValueOrigins(program)
    last_positions = sorted({*_find_views_for(program, cut, makers), *range(cut, len(steps))})
    inside = {out for position in last_positions for out in steps[position].writes}
    outside = len(program.inputs) + len(program.constants)
    read = dict.fromkeys(
        i
        for position in last_positions
        for i in steps[position].reads
        if i not in inside and i >= outside
    )
    if not read:
        # It reads nothing that was computed, so no steps are left for a graph to hold.
        return None
    if max(specs[out].size_bytes for out in program.outputs if out is not None) < MIN_SPLIT_BYTES:
        return None
    # Both parts keep all inputs and constants: a last step may read them too.
    first = Program(program.inputs, steps[:cut], tuple(read), program.constants, program.payloads)
    may_be_padded = _may_be_padded(steps[cut], specs)
    numbers = {index: place for place, index in enumerate((*read, *range(outside)))}
    body, new_numbers = renumber_steps((steps[position] for position in last_positions), numbers)
    inputs = (*(specs[index] for index in read), *program.inputs)
    # `_find_cut` refuses a Program with an absent output, so none is lost here.
    results = tuple(new_numbers[out] for out in program.outputs if out is not None)
    last = Program(inputs, body, results, program.constants, program.payloads)
    return SplitProgram(first, last, may_be_padded)


def _stands_alone(step: Step) -> bool:
    """Whether Inductor fuses the step with no other: a nested Program, or what a library
    computes.
    """
    return isinstance(step, Call) or (isinstance(step, Aten) and step.target in _LIBRARY_CALLS)


def _may_be_padded(step: Step, specs: Mapping[int, TensorSpec]) -> bool:
    """Whether Inductor may pad the operands of the step: GPT-2 took 1.9 times as long with its
    50,257 logits unpadded (benchmarks/LOG.md, 2026-11-30).
    """
    if not isinstance(step, Aten) or step.target not in _PRODUCTS:
        return False
    # The last operand of a product is its weight.
    weight = specs[step.reads[-1]]
    return any(size * weight.torch_dtype.itemsize % _ALIGNMENT_BYTES for size in weight.shape[-2:])


def _find_cut(program: Program) -> int | None:
    """The position of the step that makes the memory of all outputs. Only views may come after it,
    and some step that computes has to come before it; None otherwise.
    """
    steps, makers = program.steps, ValueOrigins(program)
    # A launch fills memory of an earlier Alloc, so the step that makes a result is not the one that
    # writes it.
    if any(isinstance(step, (Alloc, Launch)) for step in steps) or None in program.outputs:
        return None
    computing = [position for position, step in enumerate(steps) if not may_return_operand(step)]
    # With a single computing step there would be nothing to replay.
    if len(computing) < 2:
        return None
    cut = computing[-1]
    roots = {makers.root(out) for out in program.outputs if out is not None}
    # All outputs have to be memory that the last step makes: another step's memory is the graph's,
    # and its next replay would overwrite what the caller holds.
    return cut if roots == {cut} and makes_fresh_memory(steps[cut]) else None


def _find_views_for(program: Program, cut: int, makers: ValueOrigins) -> set[int]:
    """Positions of the views before `cut` through which its step reads. The last part makes them
    again, so that the first part yields no view.
    """
    views: set[int] = set()
    waiting: Sequence[int] = [cut]
    while waiting:
        before = {
            makers.maker(index) for position in waiting for index in program.steps[position].reads
        }
        new_views = {
            position
            for position in before
            if position is not None and may_return_operand(program.steps[position])
        } - views
        views |= new_views
        waiting = sorted(new_views)
    return views
