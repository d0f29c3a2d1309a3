"""The speed-up that is quoted for a measurement: one number of two decimals, or none.

Pure functions of numbers. What follows from a score is for `judge.evaluate.decide` to say.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from torch_cudal1.judge.benchmark.statistics import PairedSummary, compute_paper_variance
from torch_cudal1.judge.benchmark.timing_plan import TimingPlan

__all__ = ["Unstable", "round_towards_one", "score_by_paper", "score_measurement"]

_PAPER_VARIANCE = 0.005  # of the seven bucket means, absolute


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
        statistics.variance(math.log(mean) for mean in means)
        if relative
        else compute_paper_variance(means)
    )
    if variance > _PAPER_VARIANCE:
        return Unstable(
            "the bucket means vary more than the paper allows", variance, _PAPER_VARIANCE
        )
    return round_towards_one(statistics.median(means))
