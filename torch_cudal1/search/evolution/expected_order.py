"""Which proposals of an island are worth a compiler: those that a cost model expects to be fastest,
and some others.

Without a model the order stays the family's own. With one a quarter is taken from that order all
the same, so that a model that is wrong delays a good kernel and never locks it out; what would only
be slower for sure is not compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_cudal1.kernels.features import Island
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.search.cost_model.predictor import CostModel, Guess, Unknown

__all__ = ["EXPLORED", "chosen", "hopeless"]

# of what is measured, one at least: taken in the family's own order, whatever the model says
EXPLORED = 0.25
_SLOWER = 1.25  # than the best, with both at the wrong end of their intervals: not compiled


def chosen(
    proposals: Sequence[Proposal], island: Island, model: CostModel | Unknown, count: int
) -> tuple[Proposal, ...]:
    """At most `count` of `proposals`, which come in their family's order; the model's own, fastest
    first, then those to explore.
    """
    if isinstance(model, Unknown) or not proposals:
        return tuple(proposals[:count])
    guesses = model.guess(island, proposals)
    best = min(guesses, key=lambda one: one.us)
    explored = max(1, round(EXPLORED * count))
    worth = [at for at in range(len(proposals)) if not hopeless(guesses[at], best)]
    picked = sorted(worth, key=lambda at: guesses[at].us)[: max(0, count - explored)]
    picked += [at for at in range(len(proposals)) if at not in picked][:explored]
    return tuple(proposals[at] for at in picked)


def hopeless(guess: Guess, best: Guess) -> bool:
    """Whether a kernel is slower than the best one beyond the spread of both guesses."""
    return guess.low_us > _SLOWER * best.high_us
