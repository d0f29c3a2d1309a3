"""Merges fusion groups of products that share their left operand, so that one launch may serve them.

        ┌─ mm ── view ──┐                          ┌─ mm ── view ──┐
     x ─┼─ mm ── silu ──┼─   becomes one group  x ─┼─ mm ── silu ──┼─
        └─ mm ──────────┘                          └─ mm ──────────┘

A product that is read by the group of another one alone, as what a gate opens, joins that group:

        ┌─ mm ── silu ──┐
     x ─┤               mul ──   becomes one group of one result
        └─ mm ──────────┘

A merged group is worth a look beside the groups that it is made of: nothing is decided here about
speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch_cudal1.graph.fusion.fusible_ops import ROW_RESHAPES, SHARED_LEFT_DTYPES, is_product
from torch_cudal1.graph.fusion.halved_products import join_halves
from torch_cudal1.graph.fusion.partition import FusionGroup, extract_group
from torch_cudal1.graph.fusion.uses import Uses, collect_uses
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import Region
from torch_cudal1.ir.value_specs import value_specs

__all__ = ["merge_siblings"]

# Where an operator has its left operand.
_LEFT_POSITIONS = {"aten.mm.default": 0, "aten.addmm.default": 1}
# Of a decoder every layer projects what the encoder yields: a launch of all would keep every result
# until its layer comes.
_MAX_SIBLINGS = 4
# A left operand: the value that it is a reshape of, and its shape.
_Operand: TypeAlias = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class _Member:
    """A fusion group of one product, its left operand, and the steps that reshape that."""

    group: FusionGroup
    operand: int
    reshapes: tuple[int, ...]


def merge_siblings(region: Region, groups: Sequence[FusionGroup]) -> tuple[FusionGroup, ...]:
    """`groups`, of `region`, with those around products of one left operand merged; as they were
    where none share one, or no order of calls would be left.
    """
    program = region.program
    uses, specs = collect_uses(program), value_specs(program)
    merging = _Merging(region, uses, specs)
    gated = merging.merge_gates(groups)
    for merged in (merging.merge_independent(gated), gated, tuple(groups)):
        # Last: what such a group computes is not the steps that it stands for.
        merged = join_halves(region, merged, uses, specs)
        if merged != tuple(groups) and _has_order(program, merged):
            return merged
    return tuple(groups)


@dataclass(frozen=True)
class _Merging:
    """What both ways of merging look up in a region."""

    region: Region
    uses: Uses
    specs: Mapping[int, TensorSpec]

    def collect_members(self, groups: Sequence[FusionGroup]) -> dict[_Operand, list[_Member]]:
        """The groups of one product, by its left operand."""
        members: dict[_Operand, list[_Member]] = {}
        for group in groups:
            member = _read_member(group, self.uses, self.specs)
            if member is not None:
                base = member.operand
                if member.reshapes:
                    (base, *_) = self.uses.steps[member.reshapes[0]].reads
                members.setdefault((base, self.specs[member.operand].shape), []).append(member)
        return members

    def merge_gates(self, groups: Sequence[FusionGroup]) -> tuple[FusionGroup, ...]:
        """`groups` with each one that another of the same left operand alone reads merged into that."""
        merged = dict.fromkeys(groups)
        for members in self.collect_members(groups).values():
            for reader, source in itertools.permutations(members, 2):
                pair = (source, reader)
                steps = _collect_steps(pair, self.uses)
                is_read_inside = bool(set(source.group.outputs) & set(reader.group.inputs)) and all(
                    self.uses.readers.get(out, frozenset()) <= set(steps)
                    for out in source.group.outputs
                )
                if is_read_inside and all(member.group in merged for member in pair):
                    for member in pair:
                        del merged[member.group]
                    merged[self.extract(steps, f"gate{steps[0]}")] = None
        return _sort_by_steps(merged)

    def merge_independent(self, groups: Sequence[FusionGroup]) -> tuple[FusionGroup, ...]:
        """`groups` with those of one left operand that read no result of each other merged."""
        merged = dict.fromkeys(groups)
        for siblings in self.collect_members(groups).values():
            for first in range(0, len(siblings), _MAX_SIBLINGS):
                together = _leave_out_readers(siblings[first : first + _MAX_SIBLINGS])
                if len(together) > 1:
                    for member in together:
                        del merged[member.group]
                    steps = _collect_steps(together, self.uses)
                    merged[self.extract(steps, f"siblings{steps[0]}")] = None
        return _sort_by_steps(merged)

    def extract(self, steps: tuple[int, ...], name: str) -> FusionGroup:
        """The group of these steps."""
        region = self.region
        return extract_group(
            region.program, steps, self.specs, region.kind, f"{region.name}/{name}"
        )


def _sort_by_steps(groups: Iterable[FusionGroup]) -> tuple[FusionGroup, ...]:
    return tuple(sorted(groups, key=lambda group: group.steps))


def _read_member(group: FusionGroup, uses: Uses, specs: Mapping[int, TensorSpec]) -> _Member | None:
    """None for a group without a product, with several, or of a dtype that no kernel serves."""
    products = [uses.steps[p] for p in group.steps if is_product(uses.steps[p])]
    if len(products) != 1:
        return None
    (product,) = products
    if not isinstance(product, Aten) or product.target not in _LEFT_POSITIONS:
        return None
    lhs = product.args[_LEFT_POSITIONS[product.target]]
    if not isinstance(lhs, Value) or specs[lhs.index].dtype not in SHARED_LEFT_DTYPES:
        return None
    return _Member(group, lhs.index, _find_reshapes(lhs.index, uses, group.steps))


def _find_reshapes(index: int, uses: Uses, inside: Collection[int]) -> tuple[int, ...]:
    """The steps outside the group that reshape what ends as value `index`, in step order."""
    positions: list[int] = []
    while (maker := uses.maker.get(index)) is not None and maker not in inside:
        step = uses.steps[maker]
        if not isinstance(step, Aten) or step.target not in ROW_RESHAPES:
            break
        positions.insert(0, maker)
        (index,) = step.reads
    return tuple(positions)


def _leave_out_readers(members: Sequence[_Member]) -> list[_Member]:
    """Those that read no result of another: no kernel of siblings yields one result of two."""
    independent: list[_Member] = []
    for member in members:
        outputs = {out for other in independent for out in other.group.outputs}
        if outputs.isdisjoint(member.group.inputs):
            independent.append(member)
    return independent


def _collect_steps(members: Sequence[_Member], uses: Uses) -> tuple[int, ...]:
    """The steps of all, and the reshapes that make one operand look like several."""
    steps = {position for member in members for position in member.group.steps}
    if len({member.operand for member in members}) > 1:
        # From the last: a reshape that something else reads stays outside, and those before it.
        for member in members:
            for position in reversed(member.reshapes):
                if uses.is_used_only_in(position, steps):
                    steps.add(position)
    return tuple(sorted(steps))


def _has_order(program: Program, groups: Sequence[FusionGroup]) -> bool:
    """Whether each group can run as a whole once what it reads is there."""
    group_of_step = {position: group for group in groups for position in group.steps}
    items: list[FusionGroup | int] = list(
        dict.fromkeys(group_of_step.get(p, p) for p in range(len(program.steps)))
    )
    values = set(range(len(program.inputs) + len(program.constants)))
    while items:
        later: list[FusionGroup | int] = []
        for item in items:
            if not _list_reads(program, item) <= values:
                later.append(item)
                continue
            values |= set(
                item.outputs if isinstance(item, FusionGroup) else program.steps[item].writes
            )
        if len(later) == len(items):
            return False
        items = later
    return True


def _list_reads(program: Program, item: FusionGroup | int) -> set[int]:
    return set(item.inputs if isinstance(item, FusionGroup) else program.steps[item].reads)
