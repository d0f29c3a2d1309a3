"""Search strategies: `propose` yields the next candidate, `observe` takes what became of it.

The tuning loop owns the budget and the evaluations; a strategy owns the order of candidates, which
may depend on the attempts before. `StagedSearch` is the one for a region, `FixedOrder` the one for
programs that were written elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch_cudal1 import judge
from torch_cudal1.graph.fusion.fusible_ops import has_product
from torch_cudal1.graph.fusion.partition import FusionGroup, partition, splice
from torch_cudal1.graph.fusion.siblings import merge_siblings
from torch_cudal1.graph.propose import Variant
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Accepted, Candidate, Decision, Region, Rejected, Timing
from torch_cudal1.ir.schedule import Schedule
from torch_cudal1.search.group_kernels import GroupKernels, Replacements, collect_techniques
from torch_cudal1.search.schedules import (
    NOTICEABLE_SHARE,
    make_candidates,
    order_for_program,
    order_schedules,
    propose_other_base,
)
from torch_cudal1.search.space import SearchSpace, make_variant_region

__all__ = ["Attempt", "FixedOrder", "SearchHistory", "SearchStrategy", "StagedSearch"]


@dataclass(frozen=True)
class Attempt:
    """A candidate that was evaluated; `seconds`: what that took."""

    evaluation: judge.Evaluation
    seconds: float = 0.0

    @property
    def candidate(self) -> Candidate:
        """The candidate that was evaluated."""
        return self.evaluation.candidate

    @property
    def decision(self) -> Decision:
        """Accepted, or why it is not."""
        return self.evaluation.decision

    @property
    def timing(self) -> Timing | None:
        """The measurement, None if it was never reached."""
        return self.evaluation.timing


@dataclass
class SearchHistory:
    """The attempts of a search, in order."""

    attempts: list[Attempt] = field(default_factory=list)

    @property
    def best(self) -> Attempt | None:
        """The accepted attempt with the highest lower bound of its speed-up, the earlier one of
        equals; None before there is one.
        """
        best: Attempt | None = None
        best_low = 0.0
        for attempt in self.attempts:
            if not isinstance(attempt.decision, Accepted):
                continue
            # The lower end of the interval: a noisy measurement with a high mean must not win.
            if best is None or attempt.decision.timing.low > best_low:
                best, best_low = attempt, attempt.decision.timing.low
        return best

    @property
    def best_us(self) -> float | None:
        """Microseconds of the best attempt, None before there is one."""
        timing = self.best.timing if self.best is not None else None
        return timing.candidate_us if timing is not None else None

    @property
    def max_speedup(self) -> float:
        """The largest speed-up that was measured of any candidate, accepted or not; 0.0 of none."""
        timings = [attempt.timing for attempt in self.attempts if attempt.timing is not None]
        return max((timing.speedup for timing in timings), default=0.0)

    @property
    def longest_s(self) -> float:
        """Seconds of the longest evaluation, 0.0 of none."""
        return max((attempt.seconds for attempt in self.attempts), default=0.0)


class SearchStrategy(ABC):
    """The order in which candidates are tried."""

    def __init__(self) -> None:
        self.history = SearchHistory()
        self._upcoming = self._generate()

    def propose(self) -> Candidate | Rejected | None:
        """The next candidate, why one that was looked for is none, or None at the end. It may take
        as long as compiling kernels does.
        """
        # A generator: the code after a `yield` runs once the candidate was observed, and reads its
        # result.
        return next(self._upcoming, None)

    def observe(self, attempt: Attempt) -> None:
        """Learn what became of the candidate that was proposed last."""
        self.history.attempts.append(attempt)

    @abstractmethod
    def _generate(self) -> Iterator[Candidate | Rejected]:
        """The candidates; what comes next may depend on `history`."""


class FixedOrder(SearchStrategy):
    """Candidates in the order in which they come."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        # Before `super().__init__`, which calls `_generate`.
        self._candidates = candidates
        super().__init__()

    def _generate(self) -> Iterator[Candidate | Rejected]:
        yield from self._candidates


class StagedSearch(SearchStrategy):
    """Every candidate of a search space, the most promising first.

    1. `cached`: candidates of entries that may not be used without an evaluation.
    2. Kernels for products, where these are most of the time or alone save a noticeable part of it;
       those of one left operand in one launch, where that has a kernel.
    3. Rewritten forms, which cost nothing to build, unless kernels for products have won.
    4. The same with kernels in all fusion groups, unless those for products have lost; then with
       a launch for each product.
    5. And without those for products, unless they have won.
    6. The best of all with the few steps beside its kernels run the other way.

    No kernel is looked for after `deadline`, on the clock of `judge.working_s`.
    """

    def __init__(
        self,
        space: SearchSpace,
        ranking: judge.BaselineRanking,
        deadline: float,
        cached: Sequence[Candidate] = (),
    ) -> None:
        self.space, self.ranking, self.deadline, self.cached = space, ranking, deadline, cached
        super().__init__()

    def _generate(self) -> Iterator[Candidate | Rejected]:
        # They cost no search, so they are evaluated first.
        yield from self.cached
        space, variant, kernels = self.space, self.space.variant, self.space.kernels
        schedules = order_schedules(self.ranking, space.region)
        # Tidying views is what Inductor does anyway.
        rewrites = [(variant.program, variant.techniques)] if variant and variant.pays else []
        if kernels is None:
            yield from make_candidates(rewrites, schedules)
            return
        # Only now known: the budget begins after the baselines were ranked.
        kernels.deadline = self.deadline
        # A generator may return a value: rejections are yielded on the way.
        first = yield from self._choose_product_groups(kernels)
        if first:
            yield from self._splice_kernels(space.unsplit_variant, first, kernels, schedules)
        products_won = bool(first) and self.history.best_us is not None
        # A form without kernels would be a step back, and take the time for those of all groups.
        if not products_won:
            yield from make_candidates(rewrites, schedules)
        rewritten = make_variant_region(space.region, variant)
        groups = partition(rewritten, products=True).groups
        has_products = any(has_product(group.region.program) for group in groups)
        # Kernels for the same products would lose again, with others beside them.
        products_lost = first and not products_won and self.history.max_speedup < 1
        if has_products and not products_lost:
            # The same groups were tried above.
            if set(groups) != set(first):
                yield from self._splice_kernels(variant, groups, kernels, schedules)
            if merge_siblings(rewritten, groups) != groups:
                yield from self._splice_kernels(variant, groups, kernels, schedules, merges=False)
        if not products_won:
            fused = partition(rewritten).groups
            yield from self._splice_kernels(variant, fused, kernels, schedules)
        best = self.history.best
        yield from propose_other_base(best.candidate if best is not None else None, schedules)

    def _choose_product_groups(
        self, kernels: GroupKernels
    ) -> Generator[Rejected, None, tuple[FusionGroup, ...]]:
        """The groups around products that are tried before all else; yields why kernels for others
        were not taken.
        """
        space = self.space
        if not space.minor_groups:
            return space.dominant_groups
        region = make_variant_region(space.region, space.unsplit_variant)
        # Their kernels are timed alone first, because a model whose products are minor may gain
        # nothing.
        replacements, rejected = _find_shared_kernels(region, space.minor_groups, kernels)
        yield from rejected
        # Of the fastest baseline, which is what a candidate has to beat.
        fastest_us = min(self.ranking.medians_us.values(), default=0.0)
        saved_us = kernels.estimate_saving_us(list(replacements))
        return space.minor_groups if saved_us > NOTICEABLE_SHARE * fastest_us else ()

    def _splice_kernels(
        self,
        variant: Variant | None,
        groups: Sequence[FusionGroup],
        kernels: GroupKernels,
        schedules: Sequence[Schedule],
        *,
        merges: bool = True,
    ) -> Iterator[Candidate | Rejected]:
        """The rewritten form, or the region itself, with a kernel in each of `groups` that has
        one, `merges`: one for those of one left operand.
        """
        region = make_variant_region(self.space.region, variant)
        replacements, rejected = (
            _find_shared_kernels(region, groups, kernels)
            if merges
            else kernels.find_kernels(groups)
        )
        yield from rejected
        if not replacements:
            return
        callees: dict[FusionGroup, Program] = {
            group: callee for group, (callee, _) in replacements.items()
        }
        program = splice(region.program, callees)
        techniques = variant.techniques if variant else ()
        yield from make_candidates(
            [(program, techniques + collect_techniques(replacements))],
            order_for_program(program, schedules),
        )


def _find_shared_kernels(
    region: Region, groups: Sequence[FusionGroup], kernels: GroupKernels
) -> tuple[Replacements, list[Rejected]]:
    """`find_kernels` with one kernel for products of one left operand where there is one, else one
    for each.
    """
    sibling_groups = merge_siblings(region, groups)
    replacements, rejected = kernels.find_kernels(sibling_groups)
    single_groups = [group for group in groups if not _is_inside(group, replacements)]
    if sibling_groups == groups or not single_groups:
        return replacements, rejected
    single_kernels, reasons = kernels.find_kernels(single_groups)
    return {**replacements, **single_kernels}, [*rejected, *reasons]


def _is_inside(group: FusionGroup, larger_groups: Collection[FusionGroup]) -> bool:
    """Whether the steps of a fusion group are all in one of `larger_groups`."""
    return any(set(group.steps) <= set(larger.steps) for larger in larger_groups)
