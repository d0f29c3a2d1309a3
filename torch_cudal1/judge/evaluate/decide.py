"""Accept or reject: pure functions of evidence and policy. They measure and touch nothing; what a
measurement scores is `judge.benchmark.quoted_speedup`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Accepted, CheckResult, Decision, Rejected, Timing, Verdict
from torch_cudal1.ir.schedule import SCHEDULES
from torch_cudal1.judge.benchmark.timing_plan import REMEASURED_SPEEDUP

__all__ = [
    "PAPER_SUCCESS",
    "choose_baseline",
    "decide",
    "is_surprising",
]

PAPER_SUCCESS = 1.01  # CUDA-L1 paper: a speed-up counts above this
# CUDA-L1 paper: a score above this times the best so far is re-verified, as one above REMEASURED_SPEEDUP is
_OVER_BEST = 2.0
# An interval of which the ends are farther apart is no answer.
_WIDE = 2.0
_TIE = 0.02  # medians closer than this are one speed; the simpler schedule then wins


def decide(verdict: Verdict, timing: Timing | None, settings: Settings) -> Decision:
    """Accepted only if every check passed, the lower bound reaches `settings.margin` and a call
    saves `settings.min_saving_us`.
    """
    # Correctness comes first: a time is no evidence for a candidate that is wrong.
    failure = verdict.failure
    if failure is not None:
        return Rejected(_describe_failure(failure), failure.name, _list_finite_numbers(failure))
    # A verdict without any check has no failure either, and is no evidence.
    if not verdict.passed:
        return Rejected("nothing was checked", "protocol")
    if timing is None:
        return Rejected("right, but never timed", "timing")
    # The lower bound and not the centre: the best of many candidates looks better than it is.
    if timing.low < settings.margin:
        reason = _describe_speedup(timing) + f"; a swap needs {settings.margin:g}"
        return Rejected(
            reason,
            "timing",
            {"speedup": timing.speedup, "low": timing.low, "high": timing.high},
            timing,
        )
    # The ratio alone is not enough: 1.5x of a call of one microsecond saves less than half of one.
    if timing.saved_us < settings.min_saving_us:
        reason = f"saves {timing.saved_us:.2f} us a call; a swap needs {settings.min_saving_us:g}"
        return Rejected(reason, "timing", {"saved_us": timing.saved_us}, timing)
    return Accepted(timing)


def is_surprising(score: float, best: float | None) -> bool:
    """Whether a score must be measured again: above 3, or above twice the best score of the task so
    far.
    """
    return score > REMEASURED_SPEEDUP or (best is not None and score > _OVER_BEST * best)


def choose_baseline(medians_us: Mapping[str, float]) -> str:
    """The schedule with the smallest median; of those within 2 % of it, the earliest of
    `SCHEDULES`. Raises ValueError if empty.
    """
    # Eager can always run, so an empty table hides its failure: choosing anything here would too.
    if not medians_us:
        raise ValueError(
            "no baseline was measured; eager can always run, so its failure must be looked at first"
        )
    best = min(medians_us.values())
    near = [name for name, value in medians_us.items() if value <= best * (1 + _TIE)]
    # Of equally fast schedules the simplest, which compiles least: `SCHEDULES` begins with it.
    return min(near, key=SCHEDULES.index)


def _describe_speedup(timing: Timing) -> str:
    over = f"speed-up over {timing.baseline}"
    if timing.high > _WIDE * timing.low:
        # The centre of such an interval was 46 of a candidate that is as fast as its baseline.
        return (
            f"the machine was too busy to tell: the {over} is between {timing.low:.3f} and "
            f"{timing.high:.3f} in {timing.pairs} pairs; measure again while nothing else runs"
        )
    return f"{over} is {timing.speedup:.3f}, at least {timing.low:.3f}"


def _describe_failure(check: CheckResult) -> str:
    if check.detail or check.value is None:
        return check.detail or f"check {check.name!r} failed"
    return f"{check.name}: {check.value:.4g} exceeds {check.limit if check.limit is None else format(check.limit, '.4g')}"


def _list_finite_numbers(check: CheckResult) -> dict[str, float]:
    # Numbers end in JSON documents, which have neither NaN nor infinity.
    pairs = (("value", check.value), ("limit", check.limit))
    return {name: number for name, number in pairs if number is not None and math.isfinite(number)}
