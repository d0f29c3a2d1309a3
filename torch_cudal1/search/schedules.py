"""Orders schedules (eager, Inductor, each with or without a CUDA graph) and pairs them with
Programs.

The order is that in which the schedules won among the baselines of the same region, because a
rewrite rarely changes which of them suits a model. The judge decides; here is only what to try
first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch_cudal1 import judge
from torch_cudal1.ir.aliasing import is_view
from torch_cudal1.ir.cost import DEVICE_RATES, estimate_launch_us
from torch_cudal1.ir.program import Aten, Program
from torch_cudal1.ir.records import Candidate, Region
from torch_cudal1.ir.schedule import SCHEDULES, Schedule
from torch_cudal1.ir.value_specs import output_specs

__all__ = [
    "NOTICEABLE_SHARE",
    "estimate_copy_us",
    "make_candidates",
    "order_for_program",
    "order_schedules",
    "propose_other_base",
]

# An evaluation costs seconds: a third schedule is worth it for the best Program of all only, see
# `propose_other_base`.
SCHEDULES_PER_VARIANT = 2
# With fewer ATen steps beside kernels Inductor makes fewer launches, with more eager is hopeless.
_MAX_STEPS_BESIDE_KERNELS = 8
# On a busy machine the benchmark of slow baselines is off by that much.
_TIE_RATIO = 1.25
_INDUCTOR_BASES = ("inductor", "regional")
# Of a call's time. So much launching: a CUDA graph may win by it. So much saved by kernels: they
# are tried first.
NOTICEABLE_SHARE = 0.05


def make_candidates(
    variants: Sequence[tuple[Program, tuple[str, ...]]],
    schedules: Sequence[Schedule],
    *,
    origin: str = "builtin",
) -> Iterator[Candidate]:
    """Candidates for each (program, techniques) under the best schedules, all variants under the
    best schedule first.
    """
    # Every variant is tried under the best schedule before any under the second.
    for schedule in schedules[:SCHEDULES_PER_VARIANT]:
        for program, techniques in variants:
            yield Candidate(program, schedule, origin, techniques)


def order_schedules(ranking: judge.BaselineRanking, region: Region) -> list[Schedule]:
    """The schedules that ran as baselines, the most promising for candidates first.

    Of those as fast as the fastest, compiled ones come first: a rewrite leaves element-wise chains.
    A CUDA graph comes before the same without one where it may save a noticeable part of the
    region's time, launches less copies of inputs and results: a candidate that gains less than that
    loses to a baseline in a graph, and the budget may not last for more.
    """
    # What failed as a baseline would fail for a candidate too.
    measured = [
        name
        for name in SCHEDULES
        if name in ranking.medians_us and not _is_slower_twin(name, ranking.medians_us)
    ]
    fastest_us = min(ranking.medians_us.values(), default=0.0)
    # KernelBench 3/48: a graph that copies half a gigabyte took 4836 us, and 4384 us without it,
    # though launching is 5 % of a call.
    saved_us = estimate_launch_us(region.program) - estimate_copy_us(region)
    prefers_graphs = saved_us > NOTICEABLE_SHARE * fastest_us

    def sort_key(name: Schedule) -> tuple[float, bool, bool]:
        return (
            # All within the tie get one number, so the next criterion orders them.
            max(fastest_us * _TIE_RATIO, ranking.medians_us[name]),
            not name.compiles,
            prefers_graphs != name.cuda_graph,
        )

    return sorted(measured, key=sort_key)


def _is_slower_twin(name: Schedule, medians_us: Mapping[str, float]) -> bool:
    """Whether Inductor was faster the other way, as a whole or block by block: a candidate is tried
    under one of the two.
    """
    if name.base not in _INDUCTOR_BASES:
        return False
    twins = [Schedule(base, name.cuda_graph) for base in _INDUCTOR_BASES]
    # Of equally fast ones the first, as a minimum is.
    return name != min(twins, key=lambda twin: medians_us.get(twin, math.inf))


def estimate_copy_us(region: Region) -> float:
    """About what a CUDA graph takes to copy the region's inputs, but for weights, and its outputs."""
    inputs = [
        spec
        for spec, role in zip(region.program.inputs, region.roles, strict=True)
        if role == "input"
    ]
    copied = sum(spec.size_bytes for spec in (*inputs, *filter(None, output_specs(region.program))))
    return 2e6 * copied / DEVICE_RATES["cuda"].bytes_per_s  # each byte is read and written


def order_for_program(program: Program, schedules: Sequence[Schedule]) -> list[Schedule]:
    """The schedules in their order; where no step is left for Inductor to compile, eager first, and
    where many are, without eager, as long as Inductor is among them.
    """
    count = _count_aten_steps(program)
    if count > _MAX_STEPS_BESIDE_KERNELS and any(schedule.compiles for schedule in schedules):
        return [schedule for schedule in schedules if schedule.compiles]
    if count:
        return list(schedules)
    return sorted(schedules, key=lambda schedule: schedule.compiles)


def propose_other_base(
    best: Candidate | None, schedules: Sequence[Schedule]
) -> Iterator[Candidate]:
    """`best` with the few ATen steps beside its kernels run by eager instead of Inductor, or the
    other way round, unless that was tried: the order of schedules is that of the whole region,
    most of which is kernels now.
    """
    # Without kernels the order of the baselines holds.
    if best is None or not best.program.launches:
        return
    if not 1 <= _count_aten_steps(best.program) <= _MAX_STEPS_BESIDE_KERNELS:
        return
    proposed = order_for_program(best.program, schedules)[:SCHEDULES_PER_VARIANT]
    # Bases that were tried, with or without a graph.
    bases = {schedule.base for schedule in (best.schedule, *proposed)}
    other = next((schedule for schedule in schedules if schedule.base not in bases), None)
    if other is not None:
        yield replace(best, schedule=other)


def _count_aten_steps(program: Program) -> int:
    # A view launches nothing.
    return sum(isinstance(step, Aten) and not is_view(step) for step in program.steps)
