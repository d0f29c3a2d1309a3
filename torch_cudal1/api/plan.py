"""`cudal1 plan`: what tuning a model may bring, before any of it is paid for. Works without a GPU
and runs no candidate.

Shares of time and speed-ups are roofline estimates from shapes; where a decision is already cached,
its measured lower bound takes the estimate's place and the row says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torch_cudal1 import kernels
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.report import Plan, PlanRow
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import find_device
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.fusion.partition import partition
from torch_cudal1.graph.propose import rewrite_region
from torch_cudal1.ir.cost import DEVICE_RATES, estimate_cost
from torch_cudal1.ir.records import Region
from torch_cudal1.search.by_blocks import find_blocks_to_tune, list_block_regions
from torch_cudal1.store.cache.resolve import resolve
from torch_cudal1.store.context import TuneContext, make_context

__all__ = ["plan"]

# Below this estimated gain a plan row promises nothing, because the judge would refuse it.
MIN_GAIN = 1.05


def plan(
    module: torch.nn.Module, inputs: Any, settings: Settings | None = None, *, sm: int = 90
) -> Plan:
    """The expected gain of tuning `module` at `inputs`, region by region and end to end (Amdahl's
    law).

    `sm` is the architecture that kernel templates are looked up for when this machine has no GPU.
    """
    chosen = settings or Settings.from_env()
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    context = make_context(find_device([*args, *module.parameters()]), chosen)
    try:
        regions = capture_regions(module, args)
    # A model that cannot be captured keeps its own forward: that is a plan too, not an error.
    except NotLowerableError as problem:
        row = PlanRow(
            region=type(module).__name__,
            key="",
            share_of_time=None,
            techniques=(),
            expected_speedup=1.0,
            cached=False,
            reason=f"stays with its baseline: {problem.reason}",
        )
        return Plan(
            target=type(module).__name__,
            device=context.device.type,
            rows=(row,),
            expected_end_to_end=1.0,
        )
    rows = _plan_all_rows(regions, context, sm)
    # Amdahl's law: fusion groups have no share of their own and are left out.
    remaining_share = sum(
        (row.share_of_time or 0.0) / row.expected_speedup
        for row in rows
        if row.share_of_time is not None
    )
    estimated_share = sum(row.share_of_time or 0.0 for row in rows)
    return Plan(
        target=type(module).__name__,
        device=context.device.type,
        rows=tuple(rows),
        expected_end_to_end=1.0 / (remaining_share + 1.0 - estimated_share) if rows else 1.0,
    )


def _plan_all_rows(regions: tuple[Region, ...], context: TuneContext, sm: int) -> list[PlanRow]:
    rates = DEVICE_RATES[context.device.type]
    seconds = {region.key: rates.estimate_s(estimate_cost(region.program)) for region in regions}
    # A module of views alone costs 0 s by the roofline, and shares must not divide by it.
    total = sum(seconds.values()) or 1.0
    rows = []
    for region in regions:
        row = _plan_region_row(region, context, seconds[region.key] / total)
        blocks = find_blocks_to_tune(region)
        searched = [region]
        if blocks is not None:
            # What lies between the blocks is not searched for.
            counts = list_block_regions(region, blocks)
            searched = [block for block, _ in counts]
            row = replace(row, reason=f"{row.reason}; decided by its blocks")
            rows += [row, *(_plan_block_row(block, count, context) for block, count in counts)]
        else:
            rows.append(row)
        rows += [
            _plan_fusion_group_row(group.region, sm)
            for part in searched
            for group in partition(part).groups
        ]
    return rows


def _plan_block_row(block: Region, occurrences: int, context: TuneContext) -> PlanRow:
    # Its time is part of the whole's share.
    row = _plan_region_row(block, context, None)
    return replace(row, reason=f"occurs {occurrences} times; {row.reason}")


def _plan_region_row(region: Region, context: TuneContext, share: float | None) -> PlanRow:
    hit = resolve(region, context.sources, context.target, context.contract).hit
    # An unsigned entry of another machine would be validated again before it runs, so it promises
    # nothing yet.
    entry = hit.entry if hit is not None and hit.vouched_by else None
    variant = rewrite_region(region, assume_finite=context.contract.assume_finite)
    if entry is not None:
        techniques, gain, reason = (
            entry.choice.techniques,
            entry.speedup,
            f"decided {entry.created}: {entry.choice.label}",
        )
    elif variant is None or not variant.pays:
        techniques, gain, reason = (), 1.0, "no rewrite pays; the fastest baseline would be kept"
    else:
        techniques, gain = variant.techniques, max(1.0, variant.gain)
        reason = (
            "estimated from FLOPs and bytes"
            if gain >= MIN_GAIN
            else "rewrites apply, but save little"
        )
    return PlanRow(
        region=region.name,
        key=region.key,
        share_of_time=share,
        techniques=techniques,
        expected_speedup=gain,
        cached=entry is not None,
        reason=reason,
    )


def _plan_fusion_group_row(region: Region, sm: int) -> PlanRow:
    families = tuple(
        dict.fromkeys(proposal.family for proposal in kernels.propose(region.program, sm))
    )
    reason = (
        f"kernel templates for sm_{sm} apply; Inductor fuses such chains too"
        if families
        else "no kernel template serves it"
    )
    return PlanRow(
        region=region.name,
        key=region.key,
        share_of_time=None,
        techniques=families,
        expected_speedup=1.0,
        cached=False,
        reason=reason,
    )
