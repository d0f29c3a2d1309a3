"""Finds kernels for the fusion groups of a model: proposes, compiles, checks and stores them.

Whether a kernel pays is measured in the whole model: timed alone, a small fusion group takes as
long as its launch, and inside a model Inductor may have fused it with its neighbours. Among the
kernels of a matrix product or a convolution a prescreen finds the fastest.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeAlias

import torch

from torch_cudal1 import judge, kernels
from torch_cudal1.core import telemetry
from torch_cudal1.graph.fusion.fusible_ops import has_product
from torch_cudal1.graph.fusion.partition import FusionGroup
from torch_cudal1.ir.cost import DEVICE_RATES, estimate_cost
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Candidate, Region, Rejected
from torch_cudal1.kernels.registry import is_shortlisted
from torch_cudal1.search import build_cache
from torch_cudal1.search.cost_model.learner import Learner
from torch_cudal1.search.cost_model.timings import timings_path
from torch_cudal1.search.evolution.evolutionary_search import EvolutionarySearch
from torch_cudal1.search.reuse import is_untimed
from torch_cudal1.search.shortlist import (
    PROPOSALS_PER_GROUP,
    list_tf32_rights,
    reject_for_failure,
    select_fastest_correct,
)
from torch_cudal1.store.cache.resolve import Hit, resolve
from torch_cudal1.store.context import TuneContext

__all__ = ["GroupKernels", "Replacements", "StoreKernel", "collect_techniques", "list_proposals"]

Replacements: TypeAlias = Mapping[FusionGroup, tuple[Program, tuple[str, ...]]]
BuildAnswers: TypeAlias = tuple[Candidate | Rejected, ...]
StoreKernel: TypeAlias = Callable[[Region, Candidate | None, Sequence[Rejected]], None]

# Processes at work while the baselines are timed. Timings suffer from company: where cores are few,
# more compilers would slow the baselines down.
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
_MAX_COMPILERS = max(2, min(4, _CORES // 4))
_UNTIMED_PROPOSALS_PER_GROUP = 2  # templates list their best guess first
_KERNEL_TIME_FRACTION = 0.6  # of the time that is left, for the kernels of one form of the region
# So many different products are checked in the whole region only; of more, the one whose kernel is
# wrong could not be named.
_MAX_UNCHECKED_PRODUCTS = 6


@dataclass
class GroupKernels:
    """Finds a kernel for each fusion group until `deadline`.

    `store_kernel` stores a checked kernel, or that there is none; `checks_each`: each is checked,
    and not in the whole region alone. By region key: `kernels_found`
    (None where there is none), `building` in the background, `proposed`, and `saved_us`, the
    microseconds of a call that a timed kernel saves.
    """

    place: TuneContext
    job: judge.EvaluationConfig
    store_kernel: StoreKernel
    deadline: float = math.inf
    checks_each: bool = False
    # By region key, since equal groups of a model share one kernel.
    kernels_found: dict[str, Candidate | None] = field(default_factory=dict)
    building: dict[str, Future[BuildAnswers]] = field(default_factory=dict)
    # remembered, because the learner's choice may change as timings come in
    proposed: dict[str, tuple[kernels.Proposal, ...]] = field(default_factory=dict)
    saved_us: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Timings of one machine and contract: those of another GPU would mislead the model.
        timings = timings_path(self.place.cache.root, self.place.target, self.place.contract)
        self.learner = Learner(timings, _parse_sm(self.place), list_tf32_rights(self.place))

    def begin(self, groups: Sequence[FusionGroup]) -> None:
        """Start compiling the proposals for `groups`, each region's once, in the background."""
        for region in {group.region.key: group.region for group in _sort_by_cost(groups)}.values():
            # A stored kernel needs no compiler.
            if self._find_stored(region) is None and (proposals := self._list_proposals(region)):
                self.building[region.key] = self._start_build(region, proposals)

    def find_kernels(self, groups: Sequence[FusionGroup]) -> tuple[Replacements, list[Rejected]]:
        """A kernel for each fusion group that a template serves, and why others are not taken. A
        part of the time until `deadline` is left to judge the whole region.
        """
        # With few kernels a failure of the whole region points at one of them.
        check = self.checks_each or (
            len({group.region.key for group in groups}) > _MAX_UNCHECKED_PRODUCTS
        )
        now_s = judge.working_s()
        until_s = now_s + _KERNEL_TIME_FRACTION * (self.deadline - now_s)
        replacements: dict[FusionGroup, tuple[Program, tuple[str, ...]]] = {}
        rejected: list[Rejected] = []
        for group in _sort_by_cost(groups):
            key = group.region.key
            if key not in self.kernels_found and judge.working_s() < until_s:
                # A reference belongs to one region, so the whole's cache must not serve a group.
                job = replace(self.job, examples=self._select_examples(group), reference_cache={})
                self.kernels_found[key], reasons = self._find_kernel(group.region, job, check=check)
                rejected += reasons
            if (kernel := self.kernels_found.get(key)) is not None:
                replacements[group] = (kernel.program, kernel.techniques)
        return replacements, rejected

    def _select_examples(self, group: FusionGroup) -> tuple[torch.Tensor, ...] | None:
        """The user's own inputs, where the fusion group takes inputs of the whole region only."""
        examples = self.job.examples
        # An inner value of the model has no example; the judge makes inputs for it.
        if examples is None or any(index >= len(examples) for index in group.inputs):
            return None
        return tuple(examples[index] for index in group.inputs)

    def estimate_saving_us(self, groups: Sequence[FusionGroup]) -> float:
        """Microseconds of a call that the kernels found for `groups` save, each timed alone;
        infinity if one was not timed.
        """
        keys = [group.region.key for group in groups]
        return sum(
            # Not timed means not known to be small: the group is tried.
            self.saved_us.get(key, math.inf)
            for key in keys
            if self.kernels_found.get(key) is not None
        )

    def _find_kernel(
        self, region: Region, job: judge.EvaluationConfig, *, check: bool
    ) -> tuple[Candidate | None, list[Rejected]]:
        """The first proposal that builds and is right; of a timed family, the fastest. A checked
        kernel is stored for every model.
        """
        hit = self._find_stored(region)
        # A stale entry is judged anew; a timed one is not of a fusion group.
        if hit is not None and hit.stale is None and is_untimed(hit.entry):
            telemetry.count("entries_reused")
            return (hit.entry.choice if hit.entry.choice.origin != "baseline" else None), []
        proposals = self._list_proposals(region)
        # Only of such families does a time alone say what a kernel takes inside a model.
        if any(is_shortlisted(proposal.family) for proposal in proposals):
            # Those of a norm or a softmax are few, and stand in every model of that width.
            check = check or not has_product(region.program)
            answers = self._wait_for_build(region, proposals)
            evolution = EvolutionarySearch(
                region,
                self.learner,
                lambda: self.deadline - judge.working_s(),
                partial(self._start_build, region),
            )
            evolution.record_builds(proposals, answers)
            kernel, reasons, self.saved_us[region.key] = select_fastest_correct(
                region, answers, self.place, job, self.deadline, check=check, generator=evolution
            )
        else:
            # The first kernel that is right wins, so each has to be checked.
            check = True
            kernel, reasons = self._find_first_correct(region, proposals)
        # A search that ran out of time must not be remembered as one that found nothing.
        out_of_time = any(reason.detector == "budget" for reason in reasons)
        # An entry with a voucher is not replaced.
        if proposals and check and not out_of_time and (hit is None or not hit.vouched_by):
            self.store_kernel(region, kernel, reasons)
        return kernel, reasons

    def _find_stored(self, region: Region) -> Hit | None:
        return resolve(region, self.place.sources, self.place.target, self.place.contract).hit

    def _list_proposals(self, region: Region) -> tuple[kernels.Proposal, ...]:
        if region.key not in self.proposed:
            proposals = list_proposals(region, _parse_sm(self.place), list_tf32_rights(self.place))
            if proposals and is_shortlisted(proposals[0].family):
                proposals = self.learner.select_proposals(
                    region.program, proposals, PROPOSALS_PER_GROUP
                )
            self.proposed[region.key] = proposals
        return self.proposed[region.key]

    def _start_build(
        self, region: Region, proposals: Sequence[kernels.Proposal]
    ) -> Future[BuildAnswers]:
        return judge.run_in_background(
            _get_compiler_threads(),
            build_cache.build_proposals,
            region,
            proposals,
            self.job,
            self.place,
        )

    def _wait_for_build(
        self, region: Region, proposals: Sequence[kernels.Proposal]
    ) -> BuildAnswers:
        # Started by `begin`, if the group was known when the search began.
        build = self.building.get(region.key)
        if build is None and proposals:
            return build_cache.build_proposals(region, proposals, self.job, self.place)
        if build is None:
            return ()
        left_s = self.deadline - judge.working_s()
        try:
            # `Future.result` takes no infinity.
            return build.result(max(0.0, left_s) if math.isfinite(left_s) else None)
        except TimeoutError:
            # it compiles on as long as the search lasts: another form may have the same group
            return (_reject_for_time("its kernels were not compiled within the budget"),)

    def _find_first_correct(
        self, region: Region, proposals: Sequence[kernels.Proposal]
    ) -> tuple[Candidate | None, list[Rejected]]:
        reasons: list[Rejected] = []
        for answer in self._wait_for_build(region, proposals):
            if isinstance(answer, Rejected):
                reasons.append(answer)
                continue
            # Before it runs: a revoked kernel is known to be harmful or wrong.
            if revoked := self.place.cache.check_revoked(answer.program):
                reasons.append(Rejected(str(revoked), "revoked"))
                continue
            # A check takes seconds, so the time is asked before each.
            if judge.working_s() > self.deadline:
                reasons.append(
                    _reject_for_time("the budget was spent before this kernel was checked")
                )
                return None, reasons
            verdict = judge.validate_candidate(
                # Without the user's examples: the kernel is stored for every model.
                region,
                answer,
                replace(self.job, examples=None, reference_cache={}),
            )
            if verdict.passed:
                return answer, reasons
            reasons.append(reject_for_failure(verdict))
        return None, reasons


def _reject_for_time(reason: str) -> Rejected:
    """A kernel that was not checked for lack of time: nothing is stored of it, since it may be
    good.
    """
    return Rejected(reason, "budget")


def _parse_sm(place: TuneContext) -> int:
    return int(place.target.arch.removeprefix("sm_"))


def list_proposals(
    region: Region, sm: int, rights: Collection[str]
) -> tuple[kernels.Proposal, ...]:
    """The kernels that a search without timings compiles for a fusion group, the most promising
    first; `rights` as for `kernels.propose`.
    """
    proposals = kernels.propose(region.program, sm, rights)
    is_timed = any(is_shortlisted(proposal.family) for proposal in proposals)
    return proposals[: PROPOSALS_PER_GROUP if is_timed else _UNTIMED_PROPOSALS_PER_GROUP]


def collect_techniques(replacements: Replacements) -> tuple[str, ...]:
    """The techniques of all kernels, each once."""
    return tuple(sorted({name for _, names in replacements.values() for name in names}))


def _sort_by_cost(groups: Sequence[FusionGroup]) -> list[FusionGroup]:
    """The groups by the estimated time of all groups of their kind, longest first; equal groups
    stay together.
    """
    # A single kind has no order, and the estimate is not free.
    if len({group.region.key for group in groups}) < 2:
        return list(groups)
    cost_s: defaultdict[str, float] = defaultdict(float)
    for group in groups:
        program = group.region.program
        # Summed over equal groups, which one kernel serves.
        cost_s[group.region.key] += DEVICE_RATES[program.device].estimate_s(estimate_cost(program))
    return sorted(groups, key=lambda group: -cost_s[group.region.key])


@cache
def _get_compiler_threads() -> ThreadPoolExecutor:
    """Threads that wait for compiler processes. They live as long as this process: the operating
    system ends a child with the thread that started it.
    """
    return ThreadPoolExecutor(_MAX_COMPILERS, "cudal1-compilers")
