"""Kernels for the islands of a model: which to take, how much is asked of each, and what the cache remembers of it.

Whether a kernel pays is asked of the whole model, where it will run: alone, an island's time is its launch, and inside a model
Inductor may have fused it with its neighbours. Of a matrix product's kernels the fastest is taken, which a heat tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from torch_cudal1 import judge, kernels, observe
from torch_cudal1.admission import is_untimed
from torch_cudal1.graph.partition import Island
from torch_cudal1.island_race import PROPOSALS, fastest_right, rights_of
from torch_cudal1.place import Place
from torch_cudal1.program.model import Program
from torch_cudal1.records import Candidate, Region, Rejected
from torch_cudal1.source.resolve import resolve

__all__ = ["IslandKernels", "Replaced", "techniques_of"]

Replaced: TypeAlias = Mapping[Island, tuple[Program, tuple[str, ...]]]
Remember: TypeAlias = Callable[[Region, Candidate | None, Sequence[Rejected]], None]

_PROPOSALS_PER_ISLAND = 2  # templates list their best guess first
_TRUSTED_TO_THE_WHOLE = 2  # so many different products are checked in the whole only; of more, a bad one must be told apart


@dataclass
class IslandKernels:
    """A search for kernels until `deadline`. `remember` stores a checked kernel, or that there is none; `known`: by region key."""

    place: Place
    job: judge.Job
    deadline: float
    remember: Remember
    known: dict[str, Candidate | None] = field(default_factory=dict)

    def found(self, islands: Sequence[Island]) -> tuple[Replaced, list[Rejected]]:
        """A kernel for each island that a template serves, and why others are not taken."""
        checked = len({island.region.key for island in islands}) > _TRUSTED_TO_THE_WHOLE
        replaced: dict[Island, tuple[Program, tuple[str, ...]]] = {}
        refused: list[Rejected] = []
        for island in islands:
            key = island.region.key
            if key not in self.known and time.monotonic() < self.deadline:
                self.known[key], reasons = self._kernel(island.region, checked=checked)
                refused += reasons
            if (kernel := self.known.get(key)) is not None:
                replaced[island] = (kernel.program, kernel.techniques)
        return replaced, refused

    def _kernel(self, region: Region, *, checked: bool) -> tuple[Candidate | None, list[Rejected]]:
        """The first proposal that builds and is right; of a product, the fastest. A checked one the cache knows for every model."""
        hit = resolve(region, self.place.sources, self.place.target, self.place.contract).hit
        if hit is not None and hit.stale is None and is_untimed(hit.entry):
            observe.count("entries_reused")
            return (hit.entry.choice if hit.entry.choice.origin != "baseline" else None), []
        arch = int(self.place.target.arch.removeprefix("sm_"))
        proposals = kernels.propose(region.program, arch, rights_of(self.place))
        if any(proposal.family == "gemm" for proposal in proposals):
            kernel, reasons = fastest_right(region, proposals[:PROPOSALS], self.place, self.job, self.deadline, checked=checked)
        else:
            checked = True
            kernel, reasons = self._first_right(region, proposals[:_PROPOSALS_PER_ISLAND])
        spent = any(reason.detector == "budget" for reason in reasons)
        if proposals and checked and not spent and (hit is None or not hit.vouched_by):
            self.remember(region, kernel, reasons)
        return kernel, reasons

    def _first_right(self, region: Region, proposals: Sequence[kernels.Proposal]) -> tuple[Candidate | None, list[Rejected]]:
        reasons: list[Rejected] = []
        for built in judge.build(region, proposals, self.job, self.place.target) if proposals else ():
            if isinstance(built, Rejected):
                reasons.append(built)
                continue
            if revoked := self.place.cache.revoked(built.program):
                reasons.append(Rejected(revoked, "revoked"))
                continue
            verdict = judge.check(region, built, replace(self.job, examples=None, book={}))
            if verdict.passed:
                return built, reasons
            failure = verdict.failure
            reasons.append(Rejected(failure.detail if failure else "no check ran", failure.name if failure else "judge"))
        return None, reasons


def techniques_of(replaced: Replaced) -> tuple[str, ...]:
    """The techniques of all kernels, each once."""
    return tuple(sorted({name for _, names in replaced.values() for name in names}))
