"""Grows fusion groups step by step: which group a step joins, and which groups merge.

A group is convex: no path leaves it and comes back, so that an order of calls exists. `partition`
makes regions of the groups.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch_cudal1.graph.fusion.epilogues import find_costly_ends, follows_product, joins_halves
from torch_cudal1.graph.fusion.fusible_ops import (
    YIELD_ROWS,
    find_layout_steps_of_scans,
    has_own_kernel,
    is_anchor,
    is_fusible,
    is_pool,
    is_product,
    is_row_op,
    may_follow,
)
from torch_cudal1.graph.fusion.uses import Uses
from torch_cudal1.ir.program import Step, TensorSpec

__all__ = ["grow_groups"]

_MAX_MERGED_STEPS = 32  # steps: more live values than that leave the registers


def grow_groups(
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
    fixed_group_at = {position: group for group in fixed_groups for position in group}
    # Layout is otherwise left to Inductor. A scan's kernel does flips itself.
    layout = find_layout_steps_of_scans(uses.steps)
    reader_steps: frozenset[int] = frozenset()
    while True:
        growth = _Growth(uses, specs, products, layout, fixed_group_at, reader_steps)
        for position in range(len(uses.steps)):
            growth.add_step(position)
        # Which values a group has to write is only known when all have grown.
        costly = frozenset().union(
            *(
                find_costly_ends(group.steps, uses, specs, is_fusible)
                for group in growth.groups
                if group.has_product
            )
        )
        # Those of a fixed group stay. The others join no product again, so there is a last turn.
        costly -= fixed_group_at.keys()
        if not costly:
            return [tuple(sorted(group.steps)) for group in growth.groups if group.steps]
        reader_steps |= costly


@dataclass
class _Group:
    """A growing fusion group: its steps, the groups it depends on, its one row operation (or
    product), and whether that is a product.
    """

    steps: list[int] = field(default_factory=list)
    above: set[int] = field(default_factory=set)
    row_op: str = ""
    has_product: bool = False


@dataclass
class _Growth:
    """The groups of the steps so far. `layout`: positions of layout steps that a scan takes in.
    `reader_steps`: those of steps that join no group around a product.
    """

    uses: Uses
    specs: Mapping[int, TensorSpec]
    products: bool
    layout: Collection[int]
    fixed_group_at: Mapping[int, tuple[int, ...]]
    reader_steps: Collection[int] = ()
    groups: list[_Group] = field(default_factory=list)
    group_of: dict[int, int] = field(default_factory=dict)  # value -> group that yields it
    # value -> groups it depends on
    upstream: dict[int, frozenset[int]] = field(default_factory=dict)
    started: dict[tuple[int, ...], int] = field(default_factory=dict)  # fixed groups

    def add_step(self, position: int) -> None:
        """Let the step join a group, start one, or stay outside."""
        step = self.uses.steps[position]
        above = self._list_upstream(step.reads)
        chosen = self._choose_group(position)
        if chosen is not None:
            self._join(chosen, position, above)
            above |= {chosen}
        for out in step.writes:
            # For every step, in a group or not: a path may leave a group through steps that stay
            # outside.
            self.upstream[out] = above
            if chosen is not None and not self._is_alone(step):
                self.group_of[out] = chosen

    def _is_alone(self, step: Step) -> bool:
        """Whether nothing joins the step."""
        return self.products and has_own_kernel(step)

    def _list_upstream(self, values: Collection[int], *but: int | None) -> frozenset[int]:
        """The groups that `values` depend on, other than by being a result of the groups `but`."""
        return frozenset().union(
            *(
                self.upstream.get(index, frozenset())
                for index in values
                if not but or self.group_of.get(index) not in but
            )
        )

    def _choose_group(self, position: int) -> int | None:
        step, fixed_group = self.uses.steps[position], self.fixed_group_at.get(position)
        # Later steps of a fixed group join it whatever they are.
        if fixed_group in self.started:
            return self.started[fixed_group]
        has_product = (
            fixed_group is not None or (self.products and is_product(step)) or self._is_alone(step)
        )
        # Their kernels read the operands from memory, so they join no earlier group.
        if has_product or is_pool(step):
            return self._start_group(has_product, fixed_group)
        fusible = position in self.layout or is_fusible(step)
        # What may follow a product differs from what may join others.
        follows = follows_product(step, self.specs) and position not in self.layout
        if follows or fusible or joins_halves(position, self.uses, self.specs, is_fusible):
            past_products = position in self.reader_steps
            chosen = self._find_latest_group(step, follows=follows, past_products=past_products)
            if chosen is not None:
                return chosen
        # No group fits: the step starts one, which may later be absorbed.
        return self._start_group(False) if fusible else None

    def _start_group(self, has_product: bool, fixed_group: tuple[int, ...] | None = None) -> int:
        self.groups.append(_Group(has_product=has_product))
        number = len(self.groups) - 1
        if fixed_group is not None:
            self.started[fixed_group] = number
        return number

    def _find_latest_group(self, step: Step, *, follows: bool, past_products: bool) -> int | None:
        """The latest group that `step` may join. `follows`: only one around a product;
        `past_products`: only another one.
        """
        for number in sorted(self._list_groups_read(step), reverse=True):
            group = self.groups[number]
            # Convexity: with such a path no order of calls exists.
            outside = self._list_upstream(set(step.reads), number)
            leaves_and_returns = number in self._close(outside)
            fits = (
                group.has_product
                if follows
                else not (group.row_op and is_row_op(step) and not may_follow(step, group.row_op))
            )
            fits = fits and not (past_products and group.has_product)
            if fits and not leaves_and_returns:
                return number
        return None

    def _list_groups_read(self, step: Step) -> set[int]:
        return {self.group_of[index] for index in step.reads if index in self.group_of}

    def _join(self, chosen: int, position: int, above: frozenset[int]) -> None:
        step, group = self.uses.steps[position], self.groups[chosen]
        group.steps.append(position)
        # At most one row operation: a kernel makes one pass over a row's elements.
        group.row_op = group.row_op or (
            str(getattr(step, "target", "")) if is_anchor(step, self.products) else ""
        )
        # After the step has joined: what it reads may now belong to its group.
        for other in self._list_groups_read(step) - {chosen}:
            if self._may_absorb(chosen, other, step):
                self._absorb(chosen, other)
        # Absorbed groups have no steps left: a group does not depend on itself.
        group.above |= {other for other in above if self.groups[other].steps} - {chosen}

    def _may_absorb(self, chosen: int, other: int, step: Step) -> bool:
        """Whether a group of element-wise steps or layout that `step` of `chosen` reads may become
        part of `chosen`.

        Two groups merge only if neither depends on the other, or no order of calls would be left.
        Nothing outside may read the merged steps: a kernel is one nest of loops, and a result of
        another size than the group's would need a second one.
        """
        target_group, other_group = self.groups[chosen], self.groups[other]
        # Two equal row operations that yield one value a row may merge, as the distances of a
        # triplet loss.
        is_compatible = not other_group.row_op or (
            other_group.row_op == target_group.row_op and other_group.row_op in YIELD_ROWS
        )
        # A path from one group through other steps into the other would make the merged group wait
        # for itself.
        outside = self._list_upstream(set(step.reads), chosen, other)
        return (
            is_compatible
            # A group around a product grows by the steps after it only.
            and not (other_group.has_product or target_group.has_product)
            and len(target_group.steps) + len(other_group.steps) <= _MAX_MERGED_STEPS
            and _is_read_only_by(other_group.steps, target_group.steps, self.uses)
            and other not in self._close(frozenset(target_group.above) | outside)
            and chosen not in self._close(frozenset(other_group.above) | outside)
        )

    def _absorb(self, chosen: int, other: int) -> None:
        target_group, other_group = self.groups[chosen], self.groups[other]
        target_group.steps += other_group.steps
        target_group.above |= other_group.above
        # A group that depends on the absorbed one depends on this one through `above`.
        other_group.steps, other_group.above = [], {chosen}
        # Later steps that read the absorbed values must find the new group.
        self.group_of.update(
            {index: chosen for index, group in self.group_of.items() if group == other}
        )

    def _close(self, start: frozenset[int]) -> set[int]:
        """All groups that `start` depends on, itself included."""
        # Transitive: `above` holds only the direct dependencies of a group as it grew.
        closure, waiting = set(start), list(start)
        while waiting:
            new_groups = self.groups[waiting.pop()].above - closure
            closure |= new_groups
            waiting += new_groups
        return closure


def _is_read_only_by(positions: Sequence[int], reader_positions: Sequence[int], uses: Uses) -> bool:
    """Whether the results of the steps at `positions` are read by these steps and those at
    `reader_positions` only.
    """
    inside = {*positions, *reader_positions}
    return all(uses.is_used_only_in(position, inside) for position in positions)
