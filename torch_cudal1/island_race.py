"""Which kernel of an island is fastest, where that can be asked of the island alone: of a matrix product, whose time is its own.

Each proposal is judged in full against the island under eager. What is put into a model is still asked of the whole model: here
only the choice among kernels is made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from torch_cudal1 import judge, kernels
from torch_cudal1.place import Place
from torch_cudal1.records import Accepted, Candidate, Region, Rejected

__all__ = ["PROPOSALS", "fastest_right", "rights_of"]

PROPOSALS = 4  # the bound that orders them is rough; a judgement costs seconds


def rights_of(place: Place) -> tuple[str, ...]:
    """The op classes whose products may be as inexact as TF32's; none under "strict"."""
    return () if place.contract.precision == "strict" else place.contract.rights


def fastest_right(
    region: Region, proposals: Sequence[kernels.Proposal], place: Place, job: judge.Job, deadline: float
) -> tuple[Candidate | None, list[Rejected]]:
    """The accepted candidate with the highest lower bound of its speed-up over eager, and why the others are not it."""
    best: tuple[float, Candidate] | None = None
    reasons: list[Rejected] = []
    ranking: judge.Ranking | None = None
    own = replace(job, examples=None, book={})
    for built in judge.build(region, proposals, job, place.target) if proposals else ():
        if isinstance(built, Rejected) or time.monotonic() > deadline:
            reasons.append(built if isinstance(built, Rejected) else Rejected("the budget was spent", "budget"))
            continue
        if revoked := place.cache.revoked(built.program):
            reasons.append(Rejected(revoked, "revoked"))
            continue
        ranking = ranking or judge.rank_baselines(region, ["eager"], own)
        decision = judge.judge(region, built, ranking, own).decision
        if not isinstance(decision, Accepted):
            reasons.append(decision)
        elif best is None or decision.timing.low > best[0]:
            best = decision.timing.low, built
    return (best[1] if best else None), reasons
