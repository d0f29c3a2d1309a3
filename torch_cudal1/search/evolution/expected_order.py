"""Selects the proposals of a fusion group to compile: the fastest by a cost model, and some others.

Without a model the family's own order holds. With a model a quarter is still taken in that order,
so that a wrong model delays a good kernel but never excludes it. A kernel that is slower than the
best beyond both predictions' spread is not compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.kernels.features import KernelFeatures
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.search.cost_model.predictor import CostModel, Prediction

__all__ = ["EXPLORED_FRACTION", "is_hopeless", "select_proposals"]

# of what is measured, one at least: taken in the family's own order, whatever the model says
EXPLORED_FRACTION = 0.25
_HOPELESS_RATIO = 1.25  # than the best, with both at the wrong end of their intervals: not compiled


def select_proposals(
    proposals: Sequence[Proposal], group: KernelFeatures, model: CostModel | Refusal, count: int
) -> tuple[Proposal, ...]:
    """At most `count` of `proposals`, which come in their family's order; the model's own, fastest
    first, then those to explore.
    """
    if isinstance(model, Refusal) or not proposals:
        return tuple(proposals[:count])
    predictions = model.predict(group, proposals)
    best = min(predictions, key=lambda one: one.us)
    # One at least, or a wrong model would never be found out.
    explored = max(1, round(EXPLORED_FRACTION * count))
    # Hopeless ones may still be explored below.
    worth = [at for at in range(len(proposals)) if not is_hopeless(predictions[at], best)]
    picked = sorted(worth, key=lambda at: predictions[at].us)[: max(0, count - explored)]
    picked += [at for at in range(len(proposals)) if at not in picked][:explored]
    return tuple(proposals[at] for at in picked)


def is_hopeless(guess: Prediction, best: Prediction) -> bool:
    """Whether a kernel is slower than the best one beyond the spread of both guesses."""
    # Both at their worst: only what is slower for sure is dropped.
    return guess.low_us > _HOPELESS_RATIO * best.high_us
