"""What a measurement is worth to a policy (CUDA-L1 paper, section 2.4.4), as pure functions of
numbers.

Buckets are seven consecutive blocks of runs, not ranges of values. The judge has the rule itself
(median of bucket means, variance gate, rounding towards 1: `judge.benchmark.quoted_speedup.score_by_paper`),
re-verification (`judge.evaluate.confirm`) and the rule which scores need it. A failure has no
score: only this module turns it into a number.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

from torch_cudal1.judge.pool.measured import Measured

__all__ = ["RewardKind", "compute_reward"]

RewardKind: TypeAlias = Literal["speedup", "log", "milestone"]
_FASTER, _MUCH_FASTER = 1.05, 2.0
# Below the reward of every correct program that is less than e = 2.7 times slower.
_LOG_FAILURE = -1.0


def compute_reward(measured: Measured, kind: RewardKind = "speedup") -> float:
    """The reward of a sample.

    speedup: the score, 0 for a failure (the paper). log: its logarithm, -1 for a failure.
    milestone: -1 for a failure, 1 for a right program, 2 from 1.05x on, 3 from 2x on: steps that
    noise seldom crosses.
    """
    if kind not in get_args(RewardKind):
        raise ValueError(f"reward {kind!r}; expected one of {get_args(RewardKind)}")
    score = measured.score
    if kind == "milestone":
        # Steps, because noise seldom moves a score across one.
        return -1.0 if score is None else 1.0 + (score >= _FASTER) + (score >= _MUCH_FASTER)
    # A failure becomes a number only here: elsewhere it has no score that could enter a mean.
    if score is None:
        return 0.0 if kind == "speedup" else _LOG_FAILURE
    return score if kind == "speedup" else math.log(score)
