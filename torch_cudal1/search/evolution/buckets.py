"""Contrastive sampling: buckets of similar performance, distinct buckets drawn by softmax, one
member of each (CUDA-L1, section 2.4.3).

Used for exemplars in prompts and for parents in an evolutionary search. Scores are compared as
logarithms in units of their standard deviation: the paper leaves temperature and bucket width open,
and no fixed value fits tasks whose speed-ups differ.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

__all__ = ["draw_by_softmax", "draw_contrasting", "group_by_score", "standardise_scores"]


def standardise_scores(scores: Sequence[float]) -> list[float]:
    """Logarithms less their mean, in standard deviations; zeros where all are equal. Scores are
    positive, larger is better.
    """
    # Speed-ups multiply: 1 to 2 is as far as 2 to 4.
    logs = [math.log(score) for score in scores]
    if len(logs) < 2:
        return [0.0] * len(logs)
    mean, deviation = statistics.fmean(logs), statistics.stdev(logs)
    # Equal scores have no spread to divide by.
    return [(log - mean) / deviation if deviation > 1e-9 else 0.0 for log in logs]


def group_by_score(scores: Sequence[float], width: float) -> list[tuple[float, list[int]]]:
    """Positions by buckets of `width` standard deviations, worst first: mean standard score,
    positions.
    """
    standard = standardise_scores(scores)
    positions_by_bucket: dict[int, list[int]] = {}
    for index, score in enumerate(standard):
        # Measured from the worst, so that the buckets do not depend on where zero lies.
        positions_by_bucket.setdefault(math.floor((score - min(standard)) / width), []).append(
            index
        )
    return [
        (statistics.fmean(standard[i] for i in members), members)
        for _, members in sorted(positions_by_bucket.items())
    ]


def draw_by_softmax(
    scores: Sequence[float], tau: float, count: int, dice: random.Random
) -> list[int]:
    """Positions without repetition, each draw with probability ~ exp(score / tau) among what is
    left.
    """
    remaining = list(range(len(scores)))
    drawn: list[int] = []
    while remaining and len(drawn) < count:
        # Subtracted below, or `exp` overflows for large scores.
        highest = max(scores[i] for i in remaining)
        weights = [math.exp((scores[i] - highest) / tau) for i in remaining]
        (index,) = dice.choices(remaining, weights)
        # Without repetition: the draw is for contrast.
        remaining.remove(index)
        drawn.append(index)
    return drawn


def draw_contrasting(
    scores: Sequence[float],
    dice: random.Random,
    *,
    count: int = 2,
    tau: float = 1.0,
    width: float = 0.5,
) -> list[int]:
    """Positions of `count` distinct buckets, one of each; fewer where there are fewer: two of one
    speed are no contrast.
    """
    buckets = group_by_score(scores, width)
    drawn = draw_by_softmax([mean for mean, _ in buckets], tau, count, dice)
    # Any member: within a bucket the differences are noise.
    return [dice.choice(buckets[index][1]) for index in drawn]
