"""Ranks a region's baselines: which schedules the settings allow, and which are worth measuring."""

from __future__ import annotations

from dataclasses import replace

from torch_cudal1 import judge
from torch_cudal1.core.report import per_call
from torch_cudal1.ir.cost import estimate_launch_us
from torch_cudal1.ir.records import Region
from torch_cudal1.ir.schedule import EAGER, INDUCTOR, MAX_AUTOTUNE, REGIONAL, Schedule
from torch_cudal1.search.quick import is_compiled_by_blocks
from torch_cudal1.store.context import TuneContext

__all__ = ["list_baseline_schedules", "rank_schedules"]

# max-autotune compiles for minutes: a user who sets a budget of ten minutes has them
_AUTOTUNE_BUDGET_S = 600.0
# of the lower bound on a region's time: launches that take less than this share of it cannot make
# a CUDA graph win
_NEGLIGIBLE_LAUNCH_SHARE = 0.02


def list_baseline_schedules(region: Region, place: TuneContext) -> list[Schedule]:
    """The baselines that the settings and the device allow, and that of the quick tier where that
    compiles the region block by block: a search must not end with less.
    """
    without = place.settings.without
    # Eager is always one: it is what runs where nothing else may.
    schedules = [EAGER] if "compile" in without else [EAGER, INDUCTOR]
    if "compile" not in without and (
        place.settings.autotune or place.settings.budget_s >= _AUTOTUNE_BUDGET_S
    ):
        schedules.append(MAX_AUTOTUNE)
    if place.device.type != "cuda" or "graphs" in without:
        return schedules
    # Blocks are called one by one, which costs time on the host that only a graph hides.
    by_blocks = "compile" not in without and is_compiled_by_blocks(region)
    in_graphs = (*schedules, REGIONAL) if by_blocks else schedules
    return schedules + [Schedule(schedule.base, cuda_graph=True) for schedule in in_graphs]


def rank_schedules(
    region: Region,
    place: TuneContext,
    job: judge.EvaluationConfig,
    launch_us: float,
    lower_bound_us: float,
) -> judge.BaselineRanking:
    """Benchmark the baselines, without CUDA graphs where launching is next to nothing of what even
    the cheapest form of the region must take: they would save none of it, and hold its inputs and
    results a second time. `launch_us`: of that form.
    """
    schedules = list_baseline_schedules(region, place)
    # The larger of both forms: neither may hide launches that a graph would save.
    most_us = max(launch_us, estimate_launch_us(region.program))
    if most_us > _NEGLIGIBLE_LAUNCH_SHARE * lower_bound_us:
        return judge.rank_baselines(region, schedules, job)
    # Each graph would hold the region's inputs and results a second time.
    plain = [schedule for schedule in schedules if not schedule.cuda_graph]
    ranking = judge.rank_baselines(region, plain, job)
    reason = f"not timed: of at least {per_call(lower_bound_us)} at most {per_call(most_us)} are launches"
    skipped = {str(schedule): reason for schedule in schedules if schedule.cuda_graph}
    # The entry keeps the reason, so that a reader does not miss these schedules.
    return replace(ranking, failures={**ranking.failures, **skipped})
