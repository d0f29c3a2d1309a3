"""Reward smoothing and advantages (CUDA-L1 paper, section 3.2 and equation 6): pure functions of
rewards.

Standardising inside a group undoes any affine map. Of the smoothing only the clip therefore has an
effect, and only where a group has at least three distinct rewards and the pool is wider than the
group. The smoothing does not bound advantages: a lone winner keeps (G - 1) / sqrt(G). It is no
defence against cheats by itself. `clip_advantage` does bound advantages; the paper has no such
clip, so it is off by default.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

__all__ = ["Moments", "Pool", "Smoothing", "smooth_rewards", "standardize_group"]

Pool: TypeAlias = Literal["running", "batch", "group"]
# Added to the group's deviation, as TRL does: a group of equal rewards has advantages of 0 instead
# of 0/0.
_EPSILON = 1e-4


@dataclass(frozen=True)
class Smoothing:
    """How rewards are transformed before they are standardised inside their group.

    `pool`: the rewards whose mean and deviation are used: "running", all rewards before this batch
    (the first batch uses its own); "batch", this batch of groups; "group", the group alone. The
    paper leaves it open. `clip`: the bound k in deviations (1.5 in the paper); None leaves rewards
    as they are. `clip_advantage`: bound of the standardised advantages; None as in the paper.
    """

    # The default is the widest pool: with the group as pool the clip changes almost nothing, since
    # the group is standardised again afterwards.
    pool: Pool = "running"
    clip: float | None = 1.5
    clip_advantage: float | None = None

    def __post_init__(self) -> None:
        if self.pool not in get_args(Pool):
            raise ValueError(f"pool {self.pool!r}; expected one of {get_args(Pool)}")
        for name in ("clip", "clip_advantage"):
            bound = getattr(self, name)
            if bound is not None and not bound > 0:
                raise ValueError(
                    f"{name} is {bound!r}; expected a number of deviations above 0, or None"
                )


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared differences of all rewards so far (Welford): the state of the
    running pool.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_rewards(self, rewards: Iterable[float]) -> Moments:
        """The moments with more rewards in them."""
        now = self
        for reward in rewards:
            count = now.count + 1
            # Welford's update: the textbook sum of squares minus square of the sum loses all digits
            # where the deviation is small beside the mean, as with rewards near 1.
            mean = now.mean + (reward - now.mean) / count
            now = replace(
                now,
                count=count,
                mean=mean,
                squares=now.squares + (reward - now.mean) * (reward - mean),
            )
        return now

    @property
    def deviation(self) -> float:
        """Sample standard deviation, 0 for fewer than two."""
        # n - 1, as `statistics.stdev` and TRL divide by.
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


def smooth_rewards(
    groups: Sequence[Sequence[float]], smoothing: Smoothing, moments: Moments
) -> tuple[list[list[float]], Moments]:
    """Return the clipped standard scores of every group's rewards, and the running moments
    including this batch.

    A pool without spread yields zeros.
    """
    batch = [reward for group in groups for reward in group]
    after = moments.with_rewards(batch)
    if smoothing.clip is None:
        return [list(group) for group in groups], after
    if smoothing.pool == "group":
        return [
            _standardize_and_clip(group, Moments().with_rewards(group), smoothing.clip)
            for group in groups
        ], after
    # Moments of before this batch, so that a cheat's reward does not widen its own bound. The first
    # batch, or equal rewards so far, leave no deviation to divide by: then the batch is its own
    # pool.
    pool = (
        moments
        if smoothing.pool == "running" and moments.deviation
        else Moments().with_rewards(batch)
    )
    return [_standardize_and_clip(group, pool, smoothing.clip) for group in groups], after


def standardize_group(rewards: Sequence[float], smoothing: Smoothing | None = None) -> list[float]:
    """Rewards of one group, standardised in it (GRPO, equation 4); clipped afterwards if
    `smoothing` says so.
    """
    mean = statistics.fmean(rewards)
    # The sample deviation, as TRL computes it; a test compares advantages with TRL's.
    deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    advantages = [(reward - mean) / (deviation + _EPSILON) for reward in rewards]
    bound = None if smoothing is None else smoothing.clip_advantage
    # After standardisation this is the one place where a bound on advantages can hold: before it,
    # any affine map is undone.
    if bound is None:
        return advantages
    return [max(-bound, min(bound, advantage)) for advantage in advantages]


def _standardize_and_clip(group: Sequence[float], pool: Moments, bound: float) -> list[float]:
    # Equal rewards say nothing about which sample is better.
    if not pool.deviation:
        return [0.0] * len(group)
    return [max(-bound, min(bound, (reward - pool.mean) / pool.deviation)) for reward in group]
