"""Measures a surprising speed-up again, in a new process, on another GPU of the same kind if there is
one; the lowest result counts.

It decides from measurements and asks for more; the caller takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.benchmark.candidate_timing import BenchmarkResult
from torch_cudal1.judge.benchmark.quoted_speedup import Unstable, score_measurement
from torch_cudal1.judge.benchmark.statistics import MAX_SPEEDUP_GAP, agree
from torch_cudal1.judge.evaluate.decide import is_surprising

__all__ = ["confirm_measurement", "find_other_device"]


def confirm_measurement(
    first: BenchmarkResult,
    again: Callable[[], BenchmarkResult],
    best: float | None,
    where: str = "the same device",
    repeat: Callable[[], BenchmarkResult] | None = None,
) -> BenchmarkResult:
    """`first`, or the slowest of several measurements where its score is surprising, it shows a gain
    although its buckets disagree, or its plan wants several processes.

    Measurements that are more than 10 % apart, and whose intervals do not overlap, fail `jump`,
    unless a third agrees with one of them. `again` measures in a fresh process, at `where`; `repeat`
    in the first one's, which is enough where only other work is in question; `best`: see
    `is_surprising`.
    """
    quoted = score_measurement(first.measurement.summary, first.measurement.plan)
    # A first measurement that is unstable or has a failed check is refused whatever others say.
    if isinstance(quoted, Unstable) or not all(check.passed for check in first.checks):
        return first
    summary, plan = first.measurement.summary, first.measurement.plan
    # Beside other work one measurement called a candidate faster that takes longer.
    is_noisy_gain = plan.profile == "fast" and summary.low > 1 and not summary.steady
    is_surprise = is_surprising(quoted, best)
    more = max(plan.processes - 1, int(is_noisy_gain or is_surprise))
    # A new process takes seconds to start, and what it would show is no matter of noise.
    if repeat is not None and plan.processes == 1 and not is_surprise:
        again = repeat
    takes = [first, *(again() for _ in range(more))]
    # One measurement can be disturbed by other work, two alike are not: a third decides.
    if more and not _has_agreeing_pair(takes):
        takes.append(again())
    if len(takes) == 1:
        return first
    # The lower bound is what a decision rests on, so the lowest of them is quoted.
    slowest = min(takes, key=lambda take: take.measurement.summary.low)
    # A check that failed in any process counts, also where another measurement is quoted.
    failed = [check for take in takes for check in take.checks if not check.passed]
    return replace(slowest, checks=(*slowest.checks, *failed, _check_jump(takes, where)))


def find_other_device(device: torch.device) -> torch.device | None:
    """Another GPU of the same model, if there is one."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    # Only the same model: speed-ups of different GPUs need not agree.
    name = torch.cuda.get_device_name(index)
    alike = [
        i
        for i in range(torch.cuda.device_count())
        if i != index and torch.cuda.get_device_name(i) == name
    ]
    return torch.device("cuda", alike[0]) if alike else None


def _has_agreeing_pair(takes: list[BenchmarkResult]) -> bool:
    return any(
        agree(left.measurement.summary, right.measurement.summary)
        for left, right in combinations(takes, 2)
    )


def _check_jump(takes: list[BenchmarkResult], where: str) -> CheckResult:
    speedups = sorted(take.measurement.summary.speedup for take in takes)
    # The closest two: it is enough that some two measurements agree.
    gap = min(high / low - 1 for low, high in pairwise(speedups))
    listing = ", ".join(f"{speedup:.3f}" for speedup in speedups)
    return CheckResult(
        "jump",
        _has_agreeing_pair(takes),
        gap,
        MAX_SPEEDUP_GAP,
        f"speed-ups in {len(takes)} processes on {where}: {listing}",
    )
