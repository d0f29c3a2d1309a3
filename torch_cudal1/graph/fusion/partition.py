"""Cuts a whole-graph Program into fused fusion groups that a kernel template may serve, and puts
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_cudal1.graph.fusion import copied_operands, dequantised
from torch_cudal1.graph.fusion.attention_pattern import find_attention_chains
from torch_cudal1.graph.fusion.epilogues import drop_loose_ends, follows_product, joins_halves
from torch_cudal1.graph.fusion.fusible_ops import (
    EXPRESSED,
    POOLS,
    ROW_OPS,
    YIELD_ROWS,
    around_scans,
    may_follow,
)
from torch_cudal1.graph.fusion.uses import Uses, collect_uses
from torch_cudal1.ir.aten import is_random, overload
from torch_cudal1.ir.program import (
    Aten,
    Call,
    Program,
    Step,
    TensorSpec,
    renumber_step,
    renumber_steps,
)
from torch_cudal1.ir.records import Kind, Region, Role
from torch_cudal1.ir.value_specs import find_unaligned_values, value_specs
from torch_cudal1.kernels import registry

__all__ = [
    "FusionGroup",
    "Partition",
    "is_product",
    "partition",
    "splice",
    "starts_group",
    "with_inputs",
]

_KERNEL_TO_ITSELF = registry.list_lone_anchors()  # their kernels take no further step in
_PRODUCTS = registry.list_anchors("product")
_RECURRENT = registry.list_anchors("sequence")
_MAX_MERGED_STEPS = 32  # steps: more live values than that leave the registers
# element-wise, though torch does not say so
_UNTAGGED = frozenset(
    {
        *("aten._to_copy.default", "aten.hardswish.default", "aten.rsub.Tensor"),
        *(
            f"aten.{name}_backward.default"
            for name in ("elu", "hardsigmoid", "hardtanh", "leaky_relu", "softplus")
        ),
    }
)
# A fusion group with an element-wise step that no kernel has would get no kernel at all, not even
# for its product. The same holds for two results in one memory, which `detach` makes of a value
# that a forward keeps for its backward.
_POINTWISE_WITH_KERNEL = EXPRESSED - {"aten.detach.default", "aten.alias.default"}
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
    """Fused fusion groups of `region`, in step order; with `products` also around matrix products
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
    groups = _grow(uses, specs, products, fixed_groups)
    fusion_groups: list[FusionGroup] = []
    askew: set[int] = set()
    for steps in (drop_loose_ends(steps, uses) for steps in groups):
        if len(steps) >= _MIN_STEPS or _is_anchor(program.steps[steps[0]], products):
            fusion_group = _extract(
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


def with_inputs(program: Program, order: Sequence[int], inputs: tuple[TensorSpec, ...]) -> Program:
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


def _grow(
    uses: Uses,
    specs: Mapping[int, TensorSpec],
    products: bool,
    fixed_groups: Sequence[tuple[int, ...]],
) -> list[tuple[int, ...]]:
    """Greedy convex groups of fusible steps, in step order. No two groups depend on each other,
    even through other steps.

    `fixed_groups`: positions that are one group from the start, and that nothing else uses the
    inner values of.
    """
    steps = uses.steps
    group_of: dict[int, int] = {}  # value -> group that yields it
    upstream: dict[int, frozenset[int]] = {}  # value -> groups it depends on
    groups: list[_Group] = []
    # Layout is otherwise left to Inductor. A scan's kernel does flips itself.
    layout = around_scans(steps)
    fixed_group_at = {position: positions for positions in fixed_groups for position in positions}
    started: dict[tuple[int, ...], int] = {}
    for position, step in enumerate(steps):
        used = set(step.reads)
        above = frozenset().union(*(upstream.get(index, frozenset()) for index in used))
        product = products and is_product(step)
        alone = products and isinstance(step, Aten) and step.target in _KERNEL_TO_ITSELF
        # Their kernels read the operands from memory, so they join no earlier group.
        starts = product or alone or _is_pool(step)
        # Later steps of a fixed group join it whatever they are.
        if position in fixed_group_at and fixed_group_at[position] in started:
            chosen: int | None = started[fixed_group_at[position]]
        else:
            starts, product = (
                starts or position in fixed_group_at,
                product or position in fixed_group_at,
            )
            # Computed before a group is chosen: what may follow a product differs from what may
            # join others.
            follows = follows_product(step, specs) and position not in layout
            fits = (
                follows
                or position in layout
                or _is_fusible(step)
                or joins_halves(position, uses, specs, _is_fusible)
            )
            chosen = (
                _choose_group(step, used, group_of, upstream, groups, follows=follows)
                if fits and not starts
                else None
            )
        # No group fits: the step starts one, which may later be absorbed.
        if chosen is None and (starts or position in layout or _is_fusible(step)):
            chosen = len(groups)
            groups.append(_Group(has_product=product or alone))
            if position in fixed_group_at:
                started[fixed_group_at[position]] = chosen
        if chosen is not None:
            group = groups[chosen]
            group.steps.append(position)
            # At most one row operation: a kernel makes one pass over a row's elements.
            group.row_op = group.row_op or (
                str(getattr(step, "target", "")) if _is_anchor(step, products) else ""
            )
            # After the step has joined: what it reads may now belong to its group.
            _absorb(
                chosen,
                used,
                group_of,
                upstream,
                groups,
                lambda other, by: _is_read_only_by(other, by, uses),
            )
            # Absorbed groups have no steps left: a group does not depend on itself.
            group.above |= {other for other in above if groups[other].steps} - {chosen}
            above |= {chosen}
        for out in step.writes:
            # For every step, in a group or not: a path may leave a group through steps that stay
            # outside.
            upstream[out] = above
            if chosen is not None and not alone:  # nothing joins what has a kernel to itself
                group_of[out] = chosen
    return [tuple(sorted(group.steps)) for group in groups if group.steps]


def _absorb(
    chosen: int,
    used: set[int],
    group_of: dict[int, int],
    upstream: Mapping[int, frozenset[int]],
    groups: Sequence[_Group],
    only_for: Callable[[Sequence[int], Sequence[int]], bool],
) -> None:
    """Merge groups of element-wise steps or layout that a step of `chosen` reads into `chosen`.

    Two groups merge only if neither depends on the other, or no order of calls would be left.
    Nothing outside may read the merged steps: a kernel is one nest of loops, and a result of
    another size than the group's would need a second one.
    """
    for other in {group_of[index] for index in used if index in group_of} - {chosen}:
        target_group, other_group = groups[chosen], groups[other]
        outside = frozenset().union(
            *(upstream.get(i, frozenset()) for i in used if group_of.get(i) not in (chosen, other))
        )
        # A path from one group through other steps into the other would make the merged group wait
        # for itself.
        is_independent = other not in _closure(frozenset(target_group.above) | outside, groups)
        is_independent = is_independent and chosen not in _closure(
            frozenset(other_group.above) | outside, groups
        )
        # Two equal row operations that yield one value a row may merge, as the distances of a
        # triplet loss.
        is_compatible = not other_group.row_op or (
            other_group.row_op == target_group.row_op and other_group.row_op in YIELD_ROWS
        )
        is_compatible = is_compatible and only_for(other_group.steps, target_group.steps)
        if (
            is_independent
            and is_compatible
            # A group around a product grows by the steps after it only.
            and not (other_group.has_product or target_group.has_product)
            and len(target_group.steps) + len(other_group.steps) <= _MAX_MERGED_STEPS
        ):
            target_group.steps += other_group.steps
            target_group.above |= other_group.above
            # A group that depends on the absorbed one depends on this one through `above`.
            other_group.steps, other_group.above = (
                [],
                {chosen},
            )
            # Later steps that read the absorbed values must find the new group.
            group_of.update({index: chosen for index, group in group_of.items() if group == other})


def _is_read_only_by(positions: Sequence[int], reader_positions: Sequence[int], uses: Uses) -> bool:
    """Whether the results of the steps at `positions` are read by these steps and those at
    `reader_positions` only.
    """
    inside = {*positions, *reader_positions}
    return all(uses.only_in(position, inside) for position in positions)


@dataclass
class _Group:
    """A growing fusion group: its steps, the groups it depends on, its one row operation (or
    product), and whether that is a product.
    """

    steps: list[int] = field(default_factory=list)
    above: set[int] = field(default_factory=set)
    row_op: str = ""
    has_product: bool = False


def _choose_group(
    step: Step,
    used: set[int],
    group_of: Mapping[int, int],
    upstream: Mapping[int, frozenset[int]],
    groups: Sequence[_Group],
    *,
    follows: bool,
) -> int | None:
    """The latest group that `step` may join. `follows`: only one around a product."""
    for group in sorted({group_of[index] for index in used if index in group_of}, reverse=True):
        outside = frozenset().union(
            *(upstream.get(index, frozenset()) for index in used if group_of.get(index) != group)
        )
        # Convexity: with such a path no order of calls exists.
        leaves_and_returns = group in _closure(outside, groups)
        has = groups[group].row_op
        fits = (
            groups[group].has_product
            if follows
            else not (has and _is_row_op(step) and not may_follow(step, has))
        )
        if fits and not leaves_and_returns:
            return group
    return None


def _closure(start: frozenset[int], groups: Sequence[_Group]) -> set[int]:
    """All groups that `start` depends on, itself included."""
    # Transitive: `above` holds only the direct dependencies of a group as it grew.
    closure, waiting = set(start), list(start)
    while waiting:
        new_groups = groups[waiting.pop()].above - closure
        closure |= new_groups
        waiting += new_groups
    return closure


def _extract(
    program: Program, steps: tuple[int, ...], specs: Mapping[int, TensorSpec], kind: Kind, name: str
) -> FusionGroup:
    """The fusion group as a Program of its own, inputs numbered by first use."""
    inside = {out for position in steps for out in program.steps[position].writes}
    inputs = list(
        dict.fromkeys(
            i for position in steps for i in program.steps[position].reads if i not in inside
        )
    )
    # A value that only the group reads is never written to memory.
    read_outside = {
        i for q, step in enumerate(program.steps) if q not in set(steps) for i in step.reads
    } | set(program.outputs)
    input_numbers = {index: number for number, index in enumerate(inputs)}
    body, numbers = renumber_steps((program.steps[position] for position in steps), input_numbers)
    outputs = tuple(sorted(inside & read_outside))
    # Numbered anew, so that equal groups of different layers have one key and one search.
    part = Program(
        tuple(specs[index] for index in inputs), body, tuple(numbers[index] for index in outputs)
    )
    # All plain inputs: a kernel is shared by groups whose weights lie elsewhere.
    roles: tuple[Role, ...] = tuple("input" for _ in inputs)
    return FusionGroup(Region(part, roles, kind, "island", name), steps, tuple(inputs), outputs)


def _is_row_op(step: Step) -> bool:
    return isinstance(step, Aten) and step.target in ROW_OPS


def _is_pool(step: Step) -> bool:
    return isinstance(step, Aten) and step.target in POOLS


def is_product(step: Step) -> bool:
    """Whether it is a matrix product that a fusion group may be made around."""
    return isinstance(step, Aten) and step.target in _PRODUCTS


def starts_group(step: Step) -> bool:
    """Whether only `partition(products=True)` makes a fusion group of it: a product, or a recurrent
    layer.
    """
    return is_product(step) or _is_recurrent(step)


def _is_recurrent(step: Step) -> bool:
    return isinstance(step, Aten) and step.target in _RECURRENT


def _is_anchor(step: Step, products: bool) -> bool:
    """Whether the step is worth a kernel by itself."""
    return _is_row_op(step) or (products and starts_group(step))


def _is_fusible(step: Step) -> bool:
    # A kernel would draw other numbers than eager, and no check could compare them.
    if not isinstance(step, Aten) or is_random(step.target, step.args, dict(step.kwargs)):
        return False
    pointwise_step = torch.Tag.pointwise in overload(step.target).tags or step.target in _UNTAGGED
    return _is_row_op(step) or (pointwise_step and step.target in _POINTWISE_WITH_KERNEL)


def _explain_left_out(step: Step) -> str:
    if not isinstance(step, Aten):
        return "already a kernel"
    if is_random(step.target, step.args, dict(step.kwargs)):
        return f"{step.target}: draws random numbers"
    if _is_fusible(step):
        return f"{step.target}: alone, nothing to fuse with"
    return f"{step.target}: left to Inductor"
