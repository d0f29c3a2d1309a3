"""Evolutionary search in two generations: records kernel times, proposes mutants of the fastest.

The times are kept for later searches. Children are compiled in the background and waited for within
a share of the time that is left; they are timed like their parents, and the same judge decides.
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

__all__ = ["EvolutionarySearch"]

Compile: TypeAlias = Callable[
    [Sequence[kernels.Proposal]], Future[tuple[Candidate | Rejected, ...]]
]

_MAX_CHILDREN = 4  # two for each compiler process
_COMPILE_TIME_FRACTION = 0.1  # of the time that is left
_MIN_COMPILE_S = 4.0  # a compiler's start and one kernel: with less than that none is built
_MAX_COMPILE_S = 30.0  # of waiting, however long the search may be


@dataclass
class EvolutionarySearch:
    """Two generations of kernels for `region`.

    `left_s` says how much time the search has; `compile` builds proposals in the background.
    """

    region: Region
    learner: Learner
    left_s: Callable[[], float]
    compile: Compile
    _proposals: dict[int, tuple[Candidate, kernels.Proposal]] = field(default_factory=dict)
    _us: dict[kernels.Proposal, float] = field(default_factory=dict)
    _failed: list[kernels.Proposal] = field(default_factory=list)

    def record_builds(
        self, proposals: Sequence[kernels.Proposal], answers: Sequence[Candidate | Rejected]
    ) -> None:
        """Record the answer of the compiler for each proposal. Fewer answers than proposals mean
        that time was up: nothing is recorded.
        """
        # Without a pair for each proposal a time could be put down to the wrong kernel.
        if len(proposals) != len(answers):
            return
        for proposal, answer in zip(proposals, answers, strict=True):
            if isinstance(answer, Candidate):
                # The candidate is kept with its id, which Python would otherwise give to another
                # object.
                self._proposals[id(answer)] = (answer, proposal)
            else:
                self._failed.append(proposal)

    def record_times(self, times_us: Sequence[tuple[Candidate, float | None]]) -> None:
        """Learn each kernel's time, and store it for later searches."""
        measured: dict[kernels.Proposal, float] = {}
        for candidate, us in times_us:
            # Built without a proposal on record, as after a time-out.
            if id(candidate) not in self._proposals:
                continue
            proposal = self._proposals[id(candidate)][1]
            if us:
                measured[proposal] = us
            else:
                self._failed.append(proposal)
        # Counted before the merge: `_us` holds the parents only.
        if self._us and measured and min(measured.values()) < min(self._us.values()):
            telemetry.count("children_won")
        self.learner.record_times(self.region.program, measured)
        self._us |= measured

    def build_next_generation(self) -> tuple[Candidate | Rejected, ...]:
        """The children that were built in time."""
        wait_s = min(_MAX_COMPILE_S, _COMPILE_TIME_FRACTION * self.left_s())
        if not self._us or wait_s < _MIN_COMPILE_S:
            return ()
        # One deadline for both halves.
        until_s = time.monotonic() + wait_s
        children = self.learner.propose_children(
            self.region.program, self._us, self._failed, _MAX_CHILDREN
        )
        # Two builds side by side, as there are two compiler processes.
        half = (len(children) + 1) // 2
        builds = [(part, self.compile(part)) for part in (children[:half], children[half:]) if part]
        built: list[Candidate | Rejected] = []
        for part, future in builds:
            try:
                answers = future.result(max(0.0, until_s - time.monotonic()))
            except TimeoutError:  # it compiles on, and the build cache keeps it for the next search
                continue
            self.record_builds(part, answers)
            built += answers
        telemetry.count("children_built", sum(isinstance(each, Candidate) for each in built))
        return tuple(built)
