"""Kernels for what lies between the blocks of a model: those that won in a block, from the cache.

A stack is cut within its layers, where a cut costs least, so that its ends are parts of a layer.
They have fusion groups of the blocks, and nothing is searched for again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_cudal1.graph.fusion.partition import FusionGroup, partition, splice
from torch_cudal1.graph.fusion.siblings import merge_siblings
from torch_cudal1.graph.propose import rewrite_region
from torch_cudal1.ir.program import Call, Program
from torch_cudal1.ir.records import Region, Role
from torch_cudal1.search.space import make_variant_region
from torch_cudal1.store.cache.resolve import resolve
from torch_cudal1.store.context import TuneContext

__all__ = ["splice_known_kernels"]


def splice_known_kernels(
    program: Program, block_programs: Sequence[Program], region: Region, place: TuneContext
) -> Program | None:
    """`program`, a segment of `region`, with the kernels that `block_programs` run in each fusion
    group that has one; None where none has.
    """
    digests = {
        step.program.digest
        for block_program in block_programs
        for step in block_program.steps
        if isinstance(step, Call)
    }
    roles: tuple[Role, ...] = tuple("input" for _ in program.inputs)
    rest = Region(program, roles, region.kind, "block", f"{region.name}/rest")
    may_rewrite = "rewrites" not in place.settings.without
    finite = place.contract.assume_finite
    variant = rewrite_region(rest, assume_finite=finite) if may_rewrite else None
    variant_region = make_variant_region(rest, variant)
    replacements: dict[FusionGroup, Program] = {}
    steps_with_kernel: set[int] = set()
    for group in _list_groups(variant_region):
        if steps_with_kernel.isdisjoint(group.steps):
            hit = resolve(group.region, place.sources, place.target, place.contract).hit
            if hit is not None and hit.entry.choice.program.digest in digests:
                replacements[group] = hit.entry.choice.program
                steps_with_kernel |= set(group.steps)
    return splice(variant_region.program, replacements) if replacements else None


def _list_groups(region: Region) -> Iterator[FusionGroup]:
    """Those with several products first, then the groups that they are made of."""
    groups = partition(region, products=True).groups
    yield from merge_siblings(region, groups)
    yield from groups
