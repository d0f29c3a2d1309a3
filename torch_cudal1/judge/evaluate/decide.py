"""Accept or reject, and what a measurement scores: pure functions of evidence and policy. They
measure and touch nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Accepted, CheckResult, Decision, Rejected, Timing, Verdict
from torch_cudal1.ir.schedule import SCHEDULES
from torch_cudal1.judge.benchmark.statistics import PairedSummary, paper_variance
from torch_cudal1.judge.benchmark.timing_plan import REMEASURED_SPEEDUP, TimingPlan

__all__ = [
    "PAPER_SUCCESS",
    "Unstable",
    "choose_baseline",
    "decide",
    "is_surprising",
    "round_towards_one",
    "score_by_paper",
    "score_measurement",
]

PAPER_SUCCESS = 1.01  # CUDA-L1 paper: a speed-up counts above this
_PAPER_VARIANCE = 0.005  # of the seven bucket means, absolute
# CUDA-L1 paper: a score above this times the best so far is re-verified, as one above SURPRISE is
_OVER_BEST = 2.0
_TIE = 0.02  # medians closer than this are one speed; the simpler schedule then wins


def decide(verdict: Verdict, timing: Timing | None, settings: Settings) -> Decision:
    """Accepted only if every check passed, the lower bound reaches `settings.margin` and a call
    saves `settings.min_saving_us`.
    """
    # Correctness comes first: a time is no evidence for a candidate that is wrong.
    failure = verdict.failure
    if failure is not None:
        return Rejected(_describe_failure(failure), failure.name, _numbers(failure))
    # A verdict without any check has no failure either, and is no evidence.
    if not verdict.passed:
        return Rejected("nothing was checked", "protocol")
    if timing is None:
        return Rejected("right, but never timed", "timing")
    # The lower bound and not the centre: the best of many candidates looks better than it is.
    if timing.low < settings.margin:
        reason = f"speed-up over {timing.baseline} is {timing.speedup:.3f}, at least {timing.low:.3f}; a swap needs {settings.margin:g}"
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


def round_towards_one(speedup: float) -> float:
    """Two decimals, rounded towards 1 (CUDA-L1 paper, reward rules): 1.118 -> 1.11, 0.992 -> 1.00,
    2.30 -> 2.30.

    The shortest decimal that is this float is rounded, so every number of two decimals stays as it
    is.
    """
    # Away from 1 would quote a gain (or a loss) that was not measured.
    rounding = ROUND_FLOOR if speedup >= 1 else ROUND_CEILING
    # `repr` is the shortest decimal of this float. Decimal(2.3) itself is 2.2999..., and would
    # become 2.29.
    return float(Decimal(repr(float(speedup))).quantize(Decimal("0.01"), rounding))


@dataclass(frozen=True)
class Unstable:
    """A measurement without a score: its buckets disagree."""

    reason: str
    value: float
    limit: float


def score_measurement(summary: PairedSummary, plan: TimingPlan) -> float | Unstable:
    """The one number a profile quotes, two decimals rounded towards 1. A failure has none: not 1,
    not -1.

    fast: the lower bound. standard, strict: the bound nearest to 1 (1.00 if the interval holds 1).
    train: the median of the bucket values. cudal1: the paper's rule, the median of the seven bucket
    means unless their variance exceeds 0.005.
    """
    # Comparisons with published numbers follow the paper's rule exactly, its absolute variance
    # included.
    if plan.gate == "paper":
        return score_by_paper(summary.means)
    # Only the plans with "reject" refuse here: under "widen" the interval became the range of the
    # buckets.
    if plan.gate == "reject" and not summary.steady:
        spread = max(summary.values) / min(summary.values)
        return Unstable(
            f"the buckets disagree by up to {spread:.3f}x after {plan.rounds}x the samples",
            spread,
            1.0,
        )
    if plan.profile == "train":
        return round_towards_one(summary.speedup)
    if plan.profile == "fast":
        return round_towards_one(summary.low)
    # An interval that holds 1 shows neither a gain nor a loss.
    return round_towards_one(min(max(1.0, summary.low), summary.high))


def score_by_paper(means: Sequence[float], *, relative: bool = False) -> float | Unstable:
    """The paper's rule for bucket means: their median rounded towards 1, unless their variance (n -
    1) exceeds 0.005.

    `relative`: the variance of their logarithms instead.
    """
    # The ratio's variance grows with its square: 0.005 allows 7 % of spread at 1x and 0.14 % at
    # 50x.
    variance = (
        statistics.variance(math.log(mean) for mean in means) if relative else paper_variance(means)
    )
    if variance > _PAPER_VARIANCE:
        return Unstable(
            "the bucket means vary more than the paper allows", variance, _PAPER_VARIANCE
        )
    return round_towards_one(statistics.median(means))


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


def _describe_failure(check: CheckResult) -> str:
    if check.detail or check.value is None:
        return check.detail or f"check {check.name!r} failed"
    return f"{check.name}: {check.value:.4g} exceeds {check.limit if check.limit is None else format(check.limit, '.4g')}"


def _numbers(check: CheckResult) -> dict[str, float]:
    # Numbers end in JSON documents, which have neither NaN nor infinity.
    pairs = (("value", check.value), ("limit", check.limit))
    return {name: number for name, number in pairs if number is not None and math.isfinite(number)}
