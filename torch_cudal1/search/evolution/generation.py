"""The next generation of an island's kernels: children of those that were measured, as far as the
cost model hopes for them.

Parents come from distinct buckets of performance, so that what made one fast meets what the other
does differently. The model's guesses are first moved by how far it was off on this very island. No
child was measured before, none is an illegal one.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from torch_cudal1.kernels.features import Island
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.search.cost_model.predictor import CostModel, Unknown
from torch_cudal1.search.evolution.buckets import contrasting
from torch_cudal1.search.evolution.mutators import child_of

__all__ = ["Draw", "Legal", "next_generation"]

Draw: TypeAlias = Callable[[Sequence[float], random.Random], list[int]]
Legal: TypeAlias = Callable[[Sequence[Proposal]], Sequence[Proposal]]

_PAIRS = 96  # drawn: many children are illegal or known
_HOPE = 0.97  # of the best time so far must be within the spread of a child's guess


def next_generation(
    measured: Mapping[Proposal, float],
    family: Collection[Proposal],
    legal: Legal,
    island: Island,
    model: CostModel | Unknown,
    *,
    count: int,
    failed: Collection[Proposal] = (),
    seed: int = 0,
    draw: Draw = contrasting,
) -> tuple[Proposal, ...]:
    """At most `count` children of the `measured` (microseconds by proposal), most promising first;
    () where none is hoped for.

    `family`: the family's own proposals, whose fields a child may have; those not tried compete
    with the children. `failed`: tried without a time. `draw`: positions of parents by their scores.
    Without a model there is no generation: blind children would cost compilers.
    """
    if isinstance(model, Unknown):
        return ()
    pool = [
        one
        for one in _pool(measured, family, draw, random.Random(seed))
        if one not in measured and one not in failed
    ]
    fit = [one for one in legal(pool) if math.isfinite(island.bound_us(one))]
    if not fit:
        return ()
    best_us, shift = min(measured.values(), default=math.inf), _shift(measured, island, model)
    hoped = [
        (guess.us, at)
        for at, guess in enumerate(model.guess(island, fit))
        if math.isfinite(guess.factor) and shift * guess.low_us < _HOPE * best_us
    ]
    return tuple(fit[at] for _, at in sorted(hoped)[:count])


def _pool(
    measured: Mapping[Proposal, float],
    family: Collection[Proposal],
    draw: Draw,
    dice: random.Random,
) -> list[Proposal]:
    """Children of drawn parents, and whoever of the family was not measured; each once."""
    parents, scores = list(measured), [1 / us for us in measured.values()]
    pairs = [[parents[at] for at in draw(scores, dice)] for _ in range(_PAIRS if parents else 0)]
    return list(dict.fromkeys([*family, *(child_of(pair, family, dice) for pair in pairs)]))


def _shift(measured: Mapping[Proposal, float], island: Island, model: CostModel) -> float:
    """The factor by which this island's kernels are slower than the model says, on average."""
    if not measured:
        return 1.0
    guesses = model.guess(island, list(measured))
    return math.exp(
        statistics.fmean(
            math.log(us / guess.us) for us, guess in zip(measured.values(), guesses, strict=True)
        )
    )
