"""Merges fusion groups of products that share their left operand, so that one launch may serve them.

        ┌─ mm ── view ──┐                          ┌─ mm ── view ──┐
     x ─┼─ mm ── silu ──┼─   becomes one group  x ─┼─ mm ── silu ──┼─
        └─ mm ──────────┘                          └─ mm ──────────┘

A merged group is worth a look beside the groups that it is made of: nothing is decided here about
speed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch_cudal1.graph.fusion.fusible_ops import is_product
from torch_cudal1.graph.fusion.partition import FusionGroup, extract_group
from torch_cudal1.graph.fusion.uses import Uses, collect_uses
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import Region
from torch_cudal1.ir.value_specs import value_specs

__all__ = ["merge_siblings"]

# Where an operator has its left operand.
_LEFT_POSITIONS = {"aten.mm.default": 0, "aten.addmm.default": 1}
_RESHAPES = frozenset({"aten.view.default", "aten._unsafe_view.default"})
# What kernels of several right operands are made for.
_DTYPES = frozenset({"float16", "bfloat16"})
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
    members: dict[_Operand, list[_Member]] = {}
    for group in groups:
        member = _read_member(group, uses, specs)
        if member is not None:
            base = uses.steps[member.reshapes[0]].reads[0] if member.reshapes else member.operand
            members.setdefault((base, specs[member.operand].shape), []).append(member)
    sibling_groups: list[FusionGroup] = []
    member_groups: set[FusionGroup] = set()
    for siblings in members.values():
        for first in range(0, len(siblings), _MAX_SIBLINGS):
            together = _leave_out_readers(siblings[first : first + _MAX_SIBLINGS])
            if len(together) > 1:
                steps = _collect_steps(together, uses)
                name = f"{region.name}/siblings{len(sibling_groups)}"
                sibling_groups.append(extract_group(program, steps, specs, region.kind, name))
                member_groups |= {member.group for member in together}
    other_groups = [group for group in groups if group not in member_groups]
    result = tuple(sorted((*other_groups, *sibling_groups), key=lambda group: group.steps))
    return result if sibling_groups and _has_order(program, result) else tuple(groups)


def _read_member(group: FusionGroup, uses: Uses, specs: Mapping[int, TensorSpec]) -> _Member | None:
    """None for a group without a product, with several, or of a dtype that no kernel serves."""
    products = [uses.steps[p] for p in group.steps if is_product(uses.steps[p])]
    if len(products) != 1:
        return None
    (product,) = products
    if not isinstance(product, Aten) or product.target not in _LEFT_POSITIONS:
        return None
    lhs = product.args[_LEFT_POSITIONS[product.target]]
    if not isinstance(lhs, Value) or specs[lhs.index].dtype not in _DTYPES:
        return None
    return _Member(group, lhs.index, _find_reshapes(lhs.index, uses, group.steps))


def _find_reshapes(index: int, uses: Uses, inside: Collection[int]) -> tuple[int, ...]:
    """The steps outside the group that reshape what ends as value `index`, in step order."""
    positions: list[int] = []
    while (maker := uses.maker.get(index)) is not None and maker not in inside:
        step = uses.steps[maker]
        if not isinstance(step, Aten) or step.target not in _RESHAPES:
            break
        positions.insert(0, maker)
        (index,) = step.reads
    return tuple(positions)


def _leave_out_readers(members: Sequence[_Member]) -> list[_Member]:
    """Those that read no result of another: a gate times what it opens is one result of two
    products, which no kernel of siblings yields.
    """
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
