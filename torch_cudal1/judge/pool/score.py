"""The score of seven buckets of single-run speed-ups (CUDA-L1 paper, section 2.4.4).

Buckets are seven consecutive blocks of runs, not ranges of values. The rule itself (median of
bucket means, variance gate, rounding towards 1) is `judge.benchmark.quoted_speedup.score_by_paper`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch_cudal1.judge.benchmark.quoted_speedup import Unstable, score_by_paper
from torch_cudal1.judge.benchmark.timing_plan import BUCKETS

__all__ = ["ScoreRule", "bucket_means", "score_of"]

ScoreRule: TypeAlias = Literal["cudal1", "strict"]


def bucket_means(ratios: Sequence[float]) -> tuple[float, ...]:
    """Means of seven equal consecutive blocks of single-run speed-ups. The rest is not used.

    Raises ValueError for fewer than seven runs.
    """
    size = len(ratios) // BUCKETS
    if not size:
        raise ValueError(f"expected at least {BUCKETS} runs, one a bucket, got {len(ratios)}")
    return tuple(
        statistics.fmean(ratios[start : start + size]) for start in range(0, size * BUCKETS, size)
    )


def score_of(means: Sequence[float], rule: ScoreRule) -> float | Unstable:
    """The score of seven bucket means, or why it is unstable.

    `rule`: "cudal1" tests the variance of the means, as the paper does; "strict" the variance of
    their logarithms. Raises ValueError for other than seven finite speed-ups above 0.
    """
    if len(means) != BUCKETS or not all(0 < mean < math.inf for mean in means):
        raise ValueError(f"expected {BUCKETS} finite speed-ups above 0, got {list(means)}")
    # The absolute rule permits a spread of 7 % at 1x, but of 0.14 % at 50x.
    return score_by_paper(means, relative=rule == "strict")
