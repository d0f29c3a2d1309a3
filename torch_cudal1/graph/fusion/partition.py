"""Cuts a whole-graph Program into fusion groups that a kernel template may serve, and puts
their replacements back.

        x ── mm ── add ── gelu ── mm ── add ── layer_norm ── out
                  └───fusion group───┘       └────────fusion group──────┘

A fusion group is a convex set of steps (no path leaves it and comes back), made of pointwise steps
around at most one row operation (norm, softmax, reduction). Layout changes stay outside, with
Inductor; so do matrix products and convolutions, except with `products`: then each starts a fusion
group of its own, which takes the pointwise steps and reshapes after it and, before it, what makes
numbers of weights of few bits; and a recurrent layer is one by itself, as is the backward of fused
attention. `reasons_left_out` says for each kind of step why. Nothing is decided here about speed: a
fusion group is only worth a look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_cudal1.graph.fusion import copied_operands, dequantised
from torch_cudal1.graph.fusion.attention_pattern import find_attention_chains
from torch_cudal1.graph.fusion.epilogues import drop_loose_ends
from torch_cudal1.graph.fusion.fusible_ops import is_anchor, is_fusible
from torch_cudal1.graph.fusion.group_growth import grow_groups
from torch_cudal1.graph.fusion.uses import Uses, collect_uses
from torch_cudal1.ir.aten import is_random
from torch_cudal1.ir.blocks import extract_steps
from torch_cudal1.ir.program import (
    Aten,
    Call,
    Program,
    Step,
    TensorSpec,
    renumber_step,
)
from torch_cudal1.ir.records import Kind, Region, Role
from torch_cudal1.ir.value_specs import find_unaligned_values, value_specs

__all__ = [
    "FusionGroup",
    "Partition",
    "extract_group",
    "partition",
    "rebase_on_inputs",
    "splice",
]

# Of one vector load. Kernels load 16 bytes at once and would fault on another address.
_ALIGNMENT = 16  # bytes
# A single pointwise step has nothing to fuse; a single row operation is worth a look.
_MIN_STEPS = 2


@dataclass(frozen=True)
class FusionGroup:
    """Steps `steps` of a whole Program as a region; `inputs[i]` is the whole's value for its input
    i, `outputs` likewise.
    """

    region: Region
    steps: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """The fusion groups of a Program, and how many steps of each kind were left out, by reason."""

    groups: tuple[FusionGroup, ...]
    reasons_left_out: Mapping[str, int]


def partition(region: Region, *, products: bool = False) -> Partition:
    """The fusion groups of `region`, in step order; with `products` also around matrix products
    and convolutions.

    Random steps are never part of one. Kernels take it for granted that tensors start at a multiple
    of 16 bytes, so nothing that reads a view from another place is one.
    """
    program = region.program
    # Known from the Program: storage offsets of its views are constants.
    specs, unaligned = value_specs(program), find_unaligned_values(program, _ALIGNMENT)
    uses = collect_uses(program)
    # Attention, quantised weights and copied operands are groups around products.
    fixed_groups = _find_fixed_groups(uses, specs) if products else ()
    groups = grow_groups(uses, specs, products, fixed_groups)
    fusion_groups: list[FusionGroup] = []
    askew: set[int] = set()
    for steps in (drop_loose_ends(steps, uses) for steps in groups):
        if len(steps) >= _MIN_STEPS or is_anchor(program.steps[steps[0]], products):
            fusion_group = extract_group(
                # "island" is what entries call a fusion group.
                program,
                steps,
                specs,
                region.kind,
                f"{region.name}/island{len(fusion_groups)}",
            )
            # After extraction: only inputs count, inner values live in registers.
            if unaligned.isdisjoint(fusion_group.inputs):
                fusion_groups.append(fusion_group)
            else:
                askew |= set(steps)
    inside = {step for fusion_group in fusion_groups for step in fusion_group.steps}
    reasons = Counter(
        f"{step.target}: reads a view that begins at no multiple of {_ALIGNMENT} bytes"
        if position in askew and isinstance(step, Aten)
        else _explain_left_out(step)
        for position, step in enumerate(program.steps)
        if position not in inside
    )
    return Partition(tuple(fusion_groups), dict(reasons))


def _find_fixed_groups(uses: Uses, specs: Mapping[int, TensorSpec]) -> tuple[tuple[int, ...], ...]:
    """Groups of steps that are fused as a whole: attention, products of quantised weights, products
    of copied operands. Where two share a step the first counts.
    """
    fixed_groups: list[tuple[int, ...]] = []
    around = (
        of(last, uses, specs)
        for of in (dequantised.find_dequantised_product, copied_operands.find_copied_operand)
        for last in range(len(uses.steps))
    )
    for positions in (*find_attention_chains(uses, specs), *around):
        # Attention chains come first, and the first one wins.
        if positions and all(set(positions).isdisjoint(other) for other in fixed_groups):
            fixed_groups.append(positions)
    return tuple(fixed_groups)


def splice(program: Program, replacements: Mapping[FusionGroup, Program]) -> Program:
    """`program` with each fusion group's steps replaced by one nested call of its Program; values
    are numbered anew.

    A fusion group is emitted as soon as its inputs exist: a step outside may need one of its
    results before its last step stood.
    """
    group_of_step = {
        step: fusion_group for fusion_group in replacements for step in fusion_group.steps
    }
    # A group takes the place of its first step, and waits until its inputs exist.
    pending: list[FusionGroup | int] = list(
        dict.fromkeys(
            group_of_step.get(position, position) for position in range(len(program.steps))
        )
    )
    # Inputs and constants keep their numbers; results are numbered anew, because a group has fewer.
    numbers = {index: index for index in range(len(program.inputs) + len(program.constants))}
    steps: list[Step] = []
    upcoming = len(numbers)
    while pending:
        # Groups are convex and do not depend on each other in a circle, so one item is always
        # ready.
        ready = next(item for item in pending if _list_inputs(item, program) <= numbers.keys())
        pending.remove(ready)
        results = ready.outputs if isinstance(ready, FusionGroup) else program.steps[ready].writes
        outs = tuple(range(upcoming, upcoming + len(results)))
        if isinstance(ready, FusionGroup):
            steps.append(
                Call(replacements[ready], tuple(numbers[index] for index in ready.inputs), outs)
            )
        else:
            steps.append(renumber_step(program.steps[ready], numbers, outs))
        numbers.update(zip(results, outs, strict=True))
        upcoming += len(results)
    outputs = tuple(None if index is None else numbers[index] for index in program.outputs)
    return Program(program.inputs, tuple(steps), outputs, program.constants, program.payloads)


def _list_inputs(item: FusionGroup | int, program: Program) -> set[int]:
    return set(item.inputs) if isinstance(item, FusionGroup) else set(program.steps[item].reads)


def rebase_on_inputs(
    program: Program, order: Sequence[int], inputs: tuple[TensorSpec, ...]
) -> Program:
    """`program` taking `inputs` instead of its own: its input i is `inputs[order[i]]`; the others
    are not used.
    """
    # Inputs may be more than before, so every later value moves by the difference.
    moved = dict(enumerate(order))
    shift = len(inputs) - len(program.inputs)
    moved.update(
        {index: index + shift for index in range(len(program.inputs), program.value_count)}
    )
    steps = tuple(
        renumber_step(step, moved, tuple(moved[out] for out in step.writes))
        for step in program.steps
    )
    outputs = tuple(None if index is None else moved[index] for index in program.outputs)
    return Program(inputs, steps, outputs, program.constants, program.payloads)


def extract_group(
    program: Program, steps: tuple[int, ...], specs: Mapping[int, TensorSpec], kind: Kind, name: str
) -> FusionGroup:
    """The fusion group as a Program of its own, inputs numbered by first use."""
    segment = extract_steps(program, steps, specs)
    # All plain inputs: a kernel is shared by groups whose weights lie elsewhere.
    roles: tuple[Role, ...] = tuple("input" for _ in segment.inputs)
    region = Region(segment.program, roles, kind, "island", name)
    return FusionGroup(region, segment.steps, segment.inputs, segment.outputs)


def _explain_left_out(step: Step) -> str:
    if not isinstance(step, Aten):
        return "already a kernel"
    if is_random(step.target, step.args, dict(step.kwargs)):
        return f"{step.target}: draws random numbers"
    if is_fusible(step):
        return f"{step.target}: alone, nothing to fuse with"
    return f"{step.target}: left to Inductor"
