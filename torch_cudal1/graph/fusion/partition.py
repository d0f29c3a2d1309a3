"""Cuts a whole-graph Program into fused islands that a kernel template may serve, and puts their
replacements back.

        x ── mm ── add ── gelu ── mm ── add ── layer_norm ── out
                  └───island───┘       └────────island──────┘

An island is a convex set of steps (no path leaves it and comes back), made of pointwise steps
around at most one row operation (norm, softmax, reduction). Layout changes stay outside, with
Inductor; so do matrix products and convolutions, except with `products`: then each starts an island
of its own, which takes the pointwise steps and reshapes after it and, before it, what makes numbers
of weights of few bits; and a recurrent layer is one by itself, as is the backward of fused
attention. `left` says for each kind of step why. Nothing is decided here about speed: an island is
only worth a look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_cudal1.graph.fusion import copied_operands, dequantised
from torch_cudal1.graph.fusion.attention_pattern import FUSED, chains
from torch_cudal1.graph.fusion.epilogues import follows_product, joins_halves, without_loose_ends
from torch_cudal1.graph.fusion.fusible_ops import (
    EXPRESSED,
    POOLS,
    ROW_OPS,
    YIELD_ROWS,
    around_scans,
    may_follow,
)
from torch_cudal1.graph.fusion.uses import Uses, uses_of
from torch_cudal1.ir.aten import is_random, overload
from torch_cudal1.ir.check import used_values
from torch_cudal1.ir.ops.recurrent_ops import TARGETS
from torch_cudal1.ir.program import (
    Aten,
    Call,
    Program,
    Step,
    TensorSpec,
    renumbered,
    renumbered_in_turn,
    step_outs,
)
from torch_cudal1.ir.records import Kind, Region, Role
from torch_cudal1.ir.value_specs import unaligned_values, value_specs
from torch_cudal1.kernels.templates import attention_step

__all__ = [
    "Island",
    "Partition",
    "is_product",
    "partition",
    "splice",
    "starts_island",
    "with_inputs",
]

_ALONE = TARGETS | attention_step.TARGETS  # their kernels take no further step in
_PRODUCTS = (
    FUSED
    | attention_step.TARGETS
    | {f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")}
)
_MAX_MERGED = 32  # steps: more live values than that leave the registers
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
# An island with an element-wise step that no kernel has would get no kernel at all, its product
# neither. So would one with two results in one memory: what a forward keeps of its own result for
# the backward is such a one, by `detach`.
_SERVED = EXPRESSED - {"aten.detach.default", "aten.alias.default"}
_ALIGNMENT = 16  # bytes
_MIN_STEPS = (
    2  # a single pointwise step has nothing to fuse; a single row operation is worth a look
)


@dataclass(frozen=True)
class Island:
    """Steps `steps` of a whole Program as a region; `inputs[i]` is the whole's value for its input
    i, `outputs` likewise.
    """

    region: Region
    steps: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """The islands of a Program, and how many steps of each kind were left out, by reason."""

    islands: tuple[Island, ...]
    left: Mapping[str, int]


def partition(whole: Region, *, products: bool = False) -> Partition:
    """Fused islands of `whole`, in step order; with `products` also around matrix products and
    convolutions.

    Random steps are never part of one. Kernels take it for granted that tensors start at a multiple
    of 16 bytes, so nothing that reads a view from another place is one.
    """
    program = whole.program
    specs, unaligned = value_specs(program), unaligned_values(program, _ALIGNMENT)
    uses = uses_of(program)
    wholes = _wholes(uses, specs) if products else ()
    groups = _grow(uses, specs, products, wholes)
    islands: list[Island] = []
    askew: set[int] = set()
    for steps in (without_loose_ends(steps, uses) for steps in groups):
        if len(steps) >= _MIN_STEPS or _is_anchor(program.steps[steps[0]], products):
            island = _extract(
                program, steps, specs, whole.kind, f"{whole.name}/island{len(islands)}"
            )
            if unaligned.isdisjoint(island.inputs):
                islands.append(island)
            else:
                askew |= set(steps)
    inside = {step for island in islands for step in island.steps}
    left = Counter(
        f"{step.target}: reads a view that begins at no multiple of {_ALIGNMENT} bytes"
        if position in askew and isinstance(step, Aten)
        else _why_left(step)
        for position, step in enumerate(program.steps)
        if position not in inside
    )
    return Partition(tuple(islands), dict(left))


def _wholes(uses: Uses, specs: Mapping[int, TensorSpec]) -> tuple[tuple[int, ...], ...]:
    """Steps that are one island from the start; of two that share a step the first."""
    found: list[tuple[int, ...]] = []
    around = (
        of(last, uses, specs)
        for of in (dequantised.chain, copied_operands.chain)
        for last in range(len(uses.steps))
    )
    for one in (*chains(uses, specs), *around):
        if one and all(set(one).isdisjoint(other) for other in found):
            found.append(one)
    return tuple(found)


def splice(whole: Program, replacements: Mapping[Island, Program]) -> Program:
    """`whole` with each island's steps replaced by one nested call of its Program; values are
    numbered anew.

    An island is emitted as soon as its inputs exist: a step outside may need one of its results
    before its last step stood.
    """
    island_of = {step: island for island in replacements for step in island.steps}
    pending: list[Island | int] = list(
        dict.fromkeys(island_of.get(position, position) for position in range(len(whole.steps)))
    )
    numbers = {index: index for index in range(len(whole.inputs) + len(whole.constants))}
    steps: list[Step] = []
    upcoming = len(numbers)
    while pending:
        ready = next(item for item in pending if _needs(item, whole) <= numbers.keys())
        pending.remove(ready)
        made = ready.outputs if isinstance(ready, Island) else step_outs(whole.steps[ready])
        outs = tuple(range(upcoming, upcoming + len(made)))
        if isinstance(ready, Island):
            steps.append(
                Call(replacements[ready], tuple(numbers[index] for index in ready.inputs), outs)
            )
        else:
            steps.append(renumbered(whole.steps[ready], numbers, outs))
        numbers.update(zip(made, outs, strict=True))
        upcoming += len(made)
    outputs = tuple(None if index is None else numbers[index] for index in whole.outputs)
    return Program(whole.inputs, tuple(steps), outputs, whole.constants, whole.payloads)


def _needs(item: Island | int, whole: Program) -> set[int]:
    return set(item.inputs) if isinstance(item, Island) else set(used_values(whole.steps[item]))


def with_inputs(program: Program, order: Sequence[int], inputs: tuple[TensorSpec, ...]) -> Program:
    """`program` taking `inputs` instead of its own: its input i is `inputs[order[i]]`; the others
    are not used.
    """
    moved = dict(enumerate(order))
    shift = len(inputs) - len(program.inputs)
    moved.update(
        {index: index + shift for index in range(len(program.inputs), program.value_count)}
    )
    steps = tuple(
        renumbered(step, moved, tuple(moved[out] for out in step_outs(step)))
        for step in program.steps
    )
    outputs = tuple(None if index is None else moved[index] for index in program.outputs)
    return Program(inputs, steps, outputs, program.constants, program.payloads)


def _grow(
    uses: Uses, specs: Mapping[int, TensorSpec], products: bool, whole: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Greedy convex groups of fusible steps, in step order. No two groups depend on each other,
    even through other steps.

    `whole`: positions that are one group from the start, and that nothing else uses the inner
    values of.
    """
    steps = uses.steps
    group_of: dict[int, int] = {}  # value -> group that yields it
    upstream: dict[int, frozenset[int]] = {}  # value -> groups it depends on
    groups: list[_Group] = []
    layout = around_scans(steps)
    given = {position: positions for positions in whole for position in positions}
    started: dict[tuple[int, ...], int] = {}
    for position, step in enumerate(steps):
        used = set(used_values(step))
        above = frozenset().union(*(upstream.get(index, frozenset()) for index in used))
        product = products and is_product(step)
        alone = products and isinstance(step, Aten) and step.target in _ALONE
        starts = (
            product or alone or _is_pool(step)
        )  # their operands are read from memory: they join nobody
        if position in given and given[position] in started:
            chosen: int | None = started[given[position]]
        else:
            starts, product = starts or position in given, product or position in given
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
        if chosen is None and (starts or position in layout or _is_fusible(step)):
            chosen = len(groups)
            groups.append(_Group(has_product=product or alone))
            if position in given:
                started[given[position]] = chosen
        if chosen is not None:
            group = groups[chosen]
            group.steps.append(position)
            group.row_op = group.row_op or (
                str(getattr(step, "target", "")) if _is_anchor(step, products) else ""
            )
            _absorb(
                chosen,
                used,
                group_of,
                upstream,
                groups,
                lambda other, by: _only_for(other, by, uses),
            )
            group.above |= {other for other in above if groups[other].steps} - {
                chosen
            }  # those taken in are it
            above |= {chosen}
        for out in step_outs(step):
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
    """Take in the groups that a step of `chosen` reads, where these are element-wise steps or
    layout that `chosen` can do itself.

    Neither depends on the other, or no path would be left between them. And nothing else reads what
    is taken in: a result of another size than the island's would be more than one nest of loops can
    write.
    """
    for other in {group_of[index] for index in used if index in group_of} - {chosen}:
        mine, its = groups[chosen], groups[other]
        outside = frozenset().union(
            *(upstream.get(i, frozenset()) for i in used if group_of.get(i) not in (chosen, other))
        )
        apart = other not in _closure(frozenset(mine.above) | outside, groups)
        apart = apart and chosen not in _closure(frozenset(its.above) | outside, groups)
        alike = not its.row_op or (
            its.row_op == mine.row_op and its.row_op in YIELD_ROWS
        )  # the distances of a triplet
        alike = alike and only_for(its.steps, mine.steps)
        if (
            apart
            and alike
            and not (its.has_product or mine.has_product)
            and len(mine.steps) + len(its.steps) <= _MAX_MERGED
        ):
            mine.steps += its.steps
            mine.above |= its.above
            its.steps, its.above = (
                [],
                {chosen},
            )  # what depends on the old one depends on the new one
            group_of.update({index: chosen for index, group in group_of.items() if group == other})


def _only_for(these: Sequence[int], others: Sequence[int], uses: Uses) -> bool:
    """Whether what the steps at `these` positions yield is read by themselves and by `others` only."""
    inside = {*these, *others}
    return all(uses.only_in(position, inside) for position in these)


@dataclass
class _Group:
    """A growing island: its steps, the groups it depends on, its one row operation (or product),
    and whether that is a product.
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
    found, waiting = set(start), list(start)
    while waiting:
        fresh = groups[waiting.pop()].above - found
        found |= fresh
        waiting += fresh
    return found


def _extract(
    program: Program, steps: tuple[int, ...], specs: Mapping[int, TensorSpec], kind: Kind, name: str
) -> Island:
    """The island as a Program of its own, inputs numbered by first use."""
    inside = {out for position in steps for out in step_outs(program.steps[position])}
    inputs = list(
        dict.fromkeys(
            i for position in steps for i in used_values(program.steps[position]) if i not in inside
        )
    )
    wanted = {
        i for q, step in enumerate(program.steps) if q not in set(steps) for i in used_values(step)
    } | set(program.outputs)
    given = {index: number for number, index in enumerate(inputs)}
    body, numbers = renumbered_in_turn((program.steps[position] for position in steps), given)
    outputs = tuple(sorted(inside & wanted))
    part = Program(
        tuple(specs[index] for index in inputs), body, tuple(numbers[index] for index in outputs)
    )
    roles: tuple[Role, ...] = tuple("input" for _ in inputs)
    return Island(Region(part, roles, kind, "island", name), steps, tuple(inputs), outputs)


def _is_row_op(step: Step) -> bool:
    return isinstance(step, Aten) and step.target in ROW_OPS


def _is_pool(step: Step) -> bool:
    return isinstance(step, Aten) and step.target in POOLS


def is_product(step: Step) -> bool:
    """Whether it is a matrix product that an island may be made around."""
    return isinstance(step, Aten) and step.target in _PRODUCTS


def starts_island(step: Step) -> bool:
    """Whether only `partition(products=True)` makes an island of it: a product, or a recurrent
    layer.
    """
    return is_product(step) or _is_recurrent(step)


def _is_recurrent(step: Step) -> bool:
    return isinstance(step, Aten) and step.target in TARGETS


def _is_anchor(step: Step, products: bool) -> bool:
    """Worth a kernel on its own."""
    return _is_row_op(step) or (products and starts_island(step))


def _is_fusible(step: Step) -> bool:
    if not isinstance(step, Aten) or is_random(step.target, step.args, dict(step.kwargs)):
        return False
    pointwise_step = torch.Tag.pointwise in overload(step.target).tags or step.target in _UNTAGGED
    return _is_row_op(step) or (pointwise_step and step.target in _SERVED)


def _why_left(step: Step) -> str:
    if not isinstance(step, Aten):
        return "already a kernel"
    if is_random(step.target, step.args, dict(step.kwargs)):
        return f"{step.target}: draws random numbers"
    if _is_fusible(step):
        return f"{step.target}: alone, nothing to fuse with"
    return f"{step.target}: left to Inductor"
