"""What a measurement is worth to a policy (CUDA-L1 paper, section 2.4.4), as pure functions of numbers.

Buckets are seven consecutive blocks of runs, not ranges of values. The rule itself (median of bucket means, variance gate, rounding
towards 1) is the judge's, `judge.decide.paper_score`; so are re-verification (`judge.confirm`) and which scores ask for it.
A failure has no score: here, and only here, it becomes a number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from torch_cudal1.judge.decide import Unstable, conservative, paper_score, surprising
from torch_cudal1.judge.profiles import BUCKETS
from torch_cudal1.training.records import Measured

__all__ = ["RewardKind", "Rule", "Unstable", "bucket_means", "conservative", "reward_of", "score_of", "surprising"]

Rule: TypeAlias = Literal["cudal1", "strict"]
RewardKind: TypeAlias = Literal["speedup", "log", "milestone"]
_FASTER, _MUCH_FASTER = 1.05, 2.0
_LOG_FAILURE = -1.0  # below every program that is right and not 2.7 times slower


def bucket_means(ratios: Sequence[float]) -> tuple[float, ...]:
    """Means of seven consecutive blocks of single-run speed-ups; what is left over at the end is not used.

    Raises ValueError for fewer than seven.
    """
    size = len(ratios) // BUCKETS
    if not size:
        raise ValueError(f"expected at least {BUCKETS} runs, one a bucket, got {len(ratios)}")
    return tuple(statistics.fmean(ratios[start : start + size]) for start in range(0, size * BUCKETS, size))


def score_of(means: Sequence[float], rule: Rule) -> float | Unstable:
    """The score of seven bucket means. `cudal1`: the paper's absolute variance; `strict`: the variance of their logarithms."""
    if len(means) != BUCKETS or not all(0 < mean < math.inf for mean in means):
        raise ValueError(f"expected {BUCKETS} finite speed-ups above 0, got {list(means)}")
    return paper_score(means, relative=rule == "strict")


def reward_of(measured: Measured, kind: RewardKind = "speedup") -> float:
    """The reward of a sample.

    speedup: the score, 0 for a failure (the paper). log: its logarithm, -1 for a failure. milestone: -1 for a failure, 1 for a
    right program, 2 from 1.05x on, 3 from 2x on: steps that noise seldom crosses.
    """
    if kind not in get_args(RewardKind):
        raise ValueError(f"reward {kind!r}; expected one of {get_args(RewardKind)}")
    score = measured.score
    if kind == "milestone":
        return -1.0 if score is None else 1.0 + (score >= _FASTER) + (score >= _MUCH_FASTER)
    if score is None:
        return 0.0 if kind == "speedup" else _LOG_FAILURE
    return score if kind == "speedup" else math.log(score)
