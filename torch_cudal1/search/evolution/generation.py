"""The next generation of a fusion group's kernels: children of measured kernels that the cost model
expects to be faster.

Parents come from distinct buckets of performance, so that a child combines a fast config with a
different one. Predictions are first scaled by the model's mean error on this fusion group. A child
is legal, and was not measured before.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.kernels.features import KernelFeatures
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.search.cost_model.predictor import CostModel
from torch_cudal1.search.evolution.buckets import draw_contrasting
from torch_cudal1.search.evolution.mutators import make_child

__all__ = ["Draw", "Legal", "propose_generation"]

Draw: TypeAlias = Callable[[Sequence[float], random.Random], list[int]]
Legal: TypeAlias = Callable[[Sequence[Proposal]], Sequence[Proposal]]

_MAX_PAIRS = 96  # drawn: many children are illegal or known
# A child is built if this fraction of the best time is within the spread of its prediction.
_MIN_IMPROVEMENT_RATIO = 0.97


def propose_generation(
    measured: Mapping[Proposal, float],
    family: Collection[Proposal],
    legal: Legal,
    group: KernelFeatures,
    model: CostModel | Refusal,
    *,
    count: int,
    failed: Collection[Proposal] = (),
    seed: int = 0,
    draw: Draw = draw_contrasting,
) -> tuple[Proposal, ...]:
    """At most `count` children of the `measured` (microseconds by proposal), most promising first;
    () where none is hoped for.

    `family`: the family's own proposals, whose fields a child may have; those not tried compete
    with the children. `failed`: tried without a time. `draw`: positions of parents by their scores.
    Without a model there is no generation: blind children would cost compilers.
    """
    if isinstance(model, Refusal):
        return ()
    pool = [
        proposal
        # Its own generator, so that the user's `random` does not move.
        for proposal in _make_pool(measured, family, draw, random.Random(seed))
        # A failed one would fail again.
        if proposal not in measured and proposal not in failed
    ]
    feasible = [
        # Legality is asked of all at once: the fusion group is traced only once.
        proposal
        for proposal in legal(pool)
        if math.isfinite(group.lower_bound_us(proposal))
    ]
    if not feasible:
        return ()
    # The model may be off by one factor on this group, which its order does not show.
    best_us, shift = (
        min(measured.values(), default=math.inf),
        _estimate_bias(measured, group, model),
    )
    promising = [
        (guess.us, at)
        for at, guess in enumerate(model.predict(group, feasible))
        # An infinite factor: the forest never saw such a kernel.
        if math.isfinite(guess.factor) and shift * guess.low_us < _MIN_IMPROVEMENT_RATIO * best_us
    ]
    return tuple(feasible[at] for _, at in sorted(promising)[:count])


def _make_pool(
    measured: Mapping[Proposal, float],
    family: Collection[Proposal],
    draw: Draw,
    dice: random.Random,
) -> list[Proposal]:
    """The family's own proposals and children of drawn parents, each once."""
    # `draw` takes larger for better.
    parents, scores = list(measured), [1 / us for us in measured.values()]
    pairs = [
        [parents[at] for at in draw(scores, dice)] for _ in range(_MAX_PAIRS if parents else 0)
    ]
    # `dict.fromkeys` keeps the order, which a set would not.
    return list(dict.fromkeys([*family, *(make_child(pair, family, dice) for pair in pairs)]))


def _estimate_bias(
    measured: Mapping[Proposal, float], group: KernelFeatures, model: CostModel
) -> float:
    """The factor by which this fusion group's kernels are slower than the model says, on average."""
    if not measured:
        return 1.0
    guesses = model.predict(group, list(measured))
    # A geometric mean, since the factors multiply.
    return math.exp(
        statistics.fmean(
            math.log(us / guess.us) for us, guess in zip(measured.values(), guesses, strict=True)
        )
    )
