"""Kernels for the islands of a model: which to take, how much is asked of each, and what the cache
remembers of it.

Whether a kernel pays is asked of the whole model, where it will run: alone, an island's time is its
launch, and inside a model Inductor may have fused it with its neighbours. Of a matrix product's or
a convolution's kernels the fastest is taken, which a heat tells.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeAlias

from torch_cudal1 import judge, kernels
from torch_cudal1.core import telemetry
from torch_cudal1.graph.fusion.partition import Island
from torch_cudal1.ir.cost import ROOFLINES, estimate
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Candidate, Region, Rejected
from torch_cudal1.search import build_cache
from torch_cudal1.search.cost_model.learner import Learner
from torch_cudal1.search.cost_model.timings import path_of
from torch_cudal1.search.evolution.generations import Generations
from torch_cudal1.search.reuse import is_untimed
from torch_cudal1.search.shortlist import PROPOSALS, RACED, fastest_right, rights_of
from torch_cudal1.store.cache.resolve import Hit, resolve
from torch_cudal1.store.context import Place

__all__ = ["IslandKernels", "Remember", "Replaced", "proposals_of", "techniques_of"]

Replaced: TypeAlias = Mapping[Island, tuple[Program, tuple[str, ...]]]
Built: TypeAlias = tuple[Candidate | Rejected, ...]
Remember: TypeAlias = Callable[[Region, Candidate | None, Sequence[Rejected]], None]

_COMPILERS = 2  # processes at work beside the race of the baselines
_PROPOSALS_PER_ISLAND = 2  # templates list their best guess first
_SHARE = 0.6  # of the time that is left, for the kernels of one form of the whole
# so many different products are checked in the whole only; of more, a bad one must be told apart
_TRUSTED_TO_THE_WHOLE = 6


@dataclass
class IslandKernels:
    """A search for kernels until `deadline`. `remember` stores a checked kernel, or that there is
    none; `known`: by region key.
    """

    place: Place
    job: judge.Job
    remember: Remember
    deadline: float = math.inf
    known: dict[str, Candidate | None] = field(default_factory=dict)
    building: dict[str, Future[Built]] = field(default_factory=dict)
    proposed: dict[str, tuple[kernels.Proposal, ...]] = field(
        default_factory=dict
    )  # as timings come in, they might change
    saved_us: dict[str, float] = field(
        default_factory=dict
    )  # of a call, by a kernel that was raced, by region key

    def __post_init__(self) -> None:
        timings = path_of(self.place.cache.root, self.place.target, self.place.contract)
        self.learner = Learner(timings, _sm(self.place), rights_of(self.place))

    def begin(self, islands: Sequence[Island]) -> None:
        """Start compiling the proposals for `islands`, each region's once, in the background."""
        for region in {
            island.region.key: island.region for island in _dearest_first(islands)
        }.values():
            if self._stored(region) is None and (proposals := self._proposals(region)):
                self.building[region.key] = self._begun(region, proposals)

    def found(self, islands: Sequence[Island]) -> tuple[Replaced, list[Rejected]]:
        """A kernel for each island that a template serves, and why others are not taken. Time is
        left to judge the whole.
        """
        checked = len({island.region.key for island in islands}) > _TRUSTED_TO_THE_WHOLE
        own, now = self.job.examples, judge.working_s()
        until = now + _SHARE * (self.deadline - now)
        replaced: dict[Island, tuple[Program, tuple[str, ...]]] = {}
        refused: list[Rejected] = []
        for island in _dearest_first(islands):
            key = island.region.key
            if key not in self.known and judge.working_s() < until:
                given = own is not None and all(index < len(own) for index in island.inputs)
                examples = (
                    tuple(own[index] for index in island.inputs)
                    if own is not None and given
                    else None
                )
                self.known[key], reasons = self._kernel(
                    island.region, replace(self.job, examples=examples, book={}), checked=checked
                )
                refused += reasons
            if (kernel := self.known.get(key)) is not None:
                replaced[island] = (kernel.program, kernel.techniques)
        return replaced, refused

    def saving_us(self, islands: Sequence[Island]) -> float:
        """Microseconds of a call that kernels found for `islands` save, told from each alone;
        infinity if one was not raced.
        """
        keys = [
            island.region.key for island in islands if self.known.get(island.region.key) is not None
        ]
        return sum(self.saved_us.get(key, math.inf) for key in keys)

    def _kernel(
        self, region: Region, job: judge.Job, *, checked: bool
    ) -> tuple[Candidate | None, list[Rejected]]:
        """The first proposal that builds and is right; of a product, the fastest. A checked one the
        cache knows for every model.

        `job` has the user's own inputs where the island takes those of the whole.
        """
        hit = self._stored(region)
        if hit is not None and hit.stale is None and is_untimed(hit.entry):
            telemetry.count("entries_reused")
            return (hit.entry.choice if hit.entry.choice.origin != "baseline" else None), []
        proposals = self._proposals(region)
        if any(proposal.family in RACED for proposal in proposals):
            answers = self._built(region, proposals)
            race = Generations(
                region,
                self.learner,
                lambda: self.deadline - judge.working_s(),
                partial(self._begun, region),
            )
            race.made(proposals, answers)
            won = fastest_right(
                region, answers, self.place, job, self.deadline, checked=checked, breeder=race
            )
            kernel, reasons, self.saved_us[region.key] = won
        else:
            checked = True
            kernel, reasons = self._first_right(region, proposals)
        spent = any(reason.detector == "budget" for reason in reasons)
        if proposals and checked and not spent and (hit is None or not hit.vouched_by):
            self.remember(region, kernel, reasons)
        return kernel, reasons

    def _stored(self, region: Region) -> Hit | None:
        return resolve(region, self.place.sources, self.place.target, self.place.contract).hit

    def _proposals(self, region: Region) -> tuple[kernels.Proposal, ...]:
        if region.key not in self.proposed:
            found = proposals_of(region, _sm(self.place), rights_of(self.place))
            raced = bool(found) and found[0].family in RACED
            self.proposed[region.key] = (
                self.learner.chosen(region.program, found, PROPOSALS) if raced else found
            )
        return self.proposed[region.key]

    def _begun(self, region: Region, proposals: Sequence[kernels.Proposal]) -> Future[Built]:
        return judge.in_background(
            _threads(), build_cache.build, region, proposals, self.job, self.place
        )

    def _built(self, region: Region, proposals: Sequence[kernels.Proposal]) -> Built:
        begun = self.building.get(region.key)
        if begun is None:
            return build_cache.build(region, proposals, self.job, self.place) if proposals else ()
        left_s = self.deadline - judge.working_s()
        try:
            return begun.result(max(0.0, left_s) if math.isfinite(left_s) else None)
        except (
            TimeoutError
        ):  # it compiles on as long as the search lasts, for the next form that asks
            return (_spent("its kernels were not compiled within the budget"),)

    def _first_right(
        self, region: Region, proposals: Sequence[kernels.Proposal]
    ) -> tuple[Candidate | None, list[Rejected]]:
        reasons: list[Rejected] = []
        for answer in self._built(region, proposals):
            if isinstance(answer, Rejected):
                reasons.append(answer)
                continue
            if revoked := self.place.cache.revoked(answer.program):
                reasons.append(Rejected(revoked, "revoked"))
                continue
            if judge.working_s() > self.deadline:
                return None, [
                    *reasons,
                    _spent("the budget was spent before this kernel was checked"),
                ]
            verdict = judge.check(region, answer, replace(self.job, examples=None, book={}))
            if verdict.passed:
                return answer, reasons
            failure = verdict.failure
            reasons.append(
                Rejected(
                    failure.detail if failure else "no check ran",
                    failure.name if failure else "judge",
                )
            )
        return None, reasons


def _spent(why: str) -> Rejected:
    """What was not asked for lack of time: it says nothing of the kernel, and is not remembered as
    useless.
    """
    return Rejected(why, "budget")


def _sm(place: Place) -> int:
    return int(place.target.arch.removeprefix("sm_"))


def proposals_of(region: Region, sm: int, rights: Collection[str]) -> tuple[kernels.Proposal, ...]:
    """The kernels that a search without timings compiles for an island, the likeliest first;
    `rights` as for `kernels.propose`.
    """
    found = kernels.propose(region.program, sm, rights)
    return found[
        : PROPOSALS
        if any(proposal.family in RACED for proposal in found)
        else _PROPOSALS_PER_ISLAND
    ]


def techniques_of(replaced: Replaced) -> tuple[str, ...]:
    """The techniques of all kernels, each once."""
    return tuple(sorted({name for _, names in replaced.values() for name in names}))


def _dearest_first(islands: Sequence[Island]) -> list[Island]:
    """Those of the kind that takes most of the model's time first, by a rough estimate; equal ones
    together.
    """
    if len({island.region.key for island in islands}) < 2:
        return list(islands)
    cost_s: defaultdict[str, float] = defaultdict(float)
    for island in islands:
        program = island.region.program
        cost_s[island.region.key] += ROOFLINES[program.device].seconds(estimate(program))
    return sorted(islands, key=lambda island: -cost_s[island.region.key])


@cache
def _threads() -> ThreadPoolExecutor:
    """Compilers beside the search. They live as long as the process: the kernel ends a child with
    the thread that started it.
    """
    return ThreadPoolExecutor(_COMPILERS, "cudal1-compilers")
