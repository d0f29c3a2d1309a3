"""The kernels of an island over two generations: what became of the first is kept for later
searches, and may father a second.

Children are compiled beside the search and waited for within a share of the time that is left. They
are raced like their parents, and the same judge decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from torch_cudal1 import kernels
from torch_cudal1.core import telemetry
from torch_cudal1.ir.records import Candidate, Region, Rejected
from torch_cudal1.search.cost_model.learner import Learner

__all__ = ["Generations"]

Compile: TypeAlias = Callable[
    [Sequence[kernels.Proposal]], Future[tuple[Candidate | Rejected, ...]]
]

_CHILDREN = 4  # two for each compiler
_SHARE = 0.1  # of the time that is left, for compiling them
_LEAST_S = 4.0  # a compiler's start and a kernel; with less than that none is asked
_LONGEST_S = 30.0  # of waiting, however long the search may be


@dataclass
class Generations:
    """A `region`'s race. `left_s` says how much time the search has; `compile` builds proposals in
    the background.
    """

    region: Region
    learner: Learner
    left_s: Callable[[], float]
    compile: Compile
    _proposals: dict[int, tuple[Candidate, kernels.Proposal]] = field(default_factory=dict)
    _us: dict[kernels.Proposal, float] = field(default_factory=dict)
    _failed: list[kernels.Proposal] = field(default_factory=list)

    def made(
        self, proposals: Sequence[kernels.Proposal], answers: Sequence[Candidate | Rejected]
    ) -> None:
        """What was compiled of which proposal. Answers that are fewer are no answers: the time was
        up.
        """
        if len(proposals) == len(answers):
            pairs = zip(proposals, answers, strict=True)
            self._proposals |= {
                id(one): (one, proposal) for proposal, one in pairs if isinstance(one, Candidate)
            }
            self._failed += [
                proposal
                for proposal, one in zip(proposals, answers, strict=True)
                if isinstance(one, Rejected)
            ]

    def heard(self, times_us: Sequence[tuple[Candidate, float | None]]) -> None:
        """Keep the times for later searches."""
        fresh: dict[kernels.Proposal, float] = {}
        for one, us in times_us:
            if id(one) not in self._proposals:
                continue
            proposal = self._proposals[id(one)][1]
            if us:
                fresh[proposal] = us
            else:
                self._failed.append(proposal)
        if self._us and fresh and min(fresh.values()) < min(self._us.values()):
            telemetry.count("children_won")
        self.learner.note(self.region.program, fresh)
        self._us |= fresh

    def next_ones(self) -> tuple[Candidate | Rejected, ...]:
        """The built children, those that were ready in time."""
        waited_s = min(_LONGEST_S, _SHARE * self.left_s())
        if not self._us or waited_s < _LEAST_S:
            return ()
        until = time.monotonic() + waited_s
        children = self.learner.children(self.region.program, self._us, self._failed, _CHILDREN)
        half = (len(children) + 1) // 2
        asked = [(part, self.compile(part)) for part in (children[:half], children[half:]) if part]
        found: list[Candidate | Rejected] = []
        for part, future in asked:
            try:
                answers = future.result(max(0.0, until - time.monotonic()))
            except TimeoutError:  # it compiles on, and what it yields is kept for the next search
                continue
            self.made(part, answers)
            found += answers
        telemetry.count("children_built", sum(isinstance(one, Candidate) for one in found))
        return tuple(found)
