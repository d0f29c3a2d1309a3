"""The timing protocol: seven buckets of paired samples, cold and hot in turn, more of them where
they disagree.

Where samples come from is a `Sampler`: two callables in this process (`LocalSampler`), two slots of
a child (`judge.benchmark.candidate_timing`), or two processes on the parent's clock
(`judge.benchmark.cross_process`). So the user's process, the judge, the benchmarks and training
measure alike. What a measurement is worth is for `judge.evaluate.decide` to say.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch

from torch_cudal1.judge.benchmark.statistics import (
    FEWEST_PAIRS,
    FEWEST_SLOW_PAIRS,
    PairedSummary,
    summarise,
)
from torch_cudal1.judge.benchmark.timing import (
    L2,
    SampleBatch,
    WarmCosts,
    batch_for,
    list_l2_states,
    sample_bucket,
    warm_up,
)
from torch_cudal1.judge.benchmark.timing_plan import (
    BUCKETS,
    REMEASURED_SPEEDUP,
    TIMING_PLANS,
    TimingPlan,
)

__all__ = ["LocalSampler", "Measurement", "Pairs", "Sampler", "measure", "sample_pairs"]
_CHANCE = random.SystemRandom()  # a process that measures keeps the user's generators as they are

Pairs: TypeAlias = list[tuple[float, float]]
_SURE = 2.58  # standard deviations of a fair coin: 0.5 % on one side
# a request for samples is kept short: it has a deadline, and its answer a size
_AT_ONCE_S, _AT_ONCE, _FIRST = (5.0, 2_000, 8)


class Sampler(Protocol):
    """Two sides that can be timed. All times are microseconds per call, baseline first."""

    @property
    def temperatures(self) -> tuple[L2, ...]:
        """Which states of the L2 cache it can sample."""
        ...

    def warm_up(self) -> tuple[WarmCosts, WarmCosts]:
        """Settle both sides."""
        ...

    def take_samples(self, batch: SampleBatch) -> Pairs:
        """Take the samples of a batch."""
        ...


@dataclass(frozen=True)
class Measurement:
    """What a plan yielded: a summary for each state of the L2 cache, and the first calls, which are
    in no sample.
    """

    plan: TimingPlan
    summaries: Mapping[L2, PairedSummary]
    first_call_us: tuple[float, float]
    rounds: int
    seconds: float

    @property
    def deciding(self) -> L2:
        """The state with the lower speed-up, by its lower bound: the place of use is not known."""
        # A candidate is used with a hot or a cold cache: where is not known, so the worse one
        # counts.
        return min(self.summaries, key=lambda l2: self.summaries[l2].low)

    @property
    def summary(self) -> PairedSummary:
        """The one that decides."""
        return self.summaries[self.deciding]

    @property
    def steady(self) -> bool:
        """Whether the buckets agree in every state."""
        return all(summary.steady for summary in self.summaries.values())


@dataclass(frozen=True)
class LocalSampler:
    """Two callables in this process."""

    run_a: Callable[[], object]
    run_b: Callable[[], object]
    device: torch.device
    temperatures: tuple[L2, ...] = ("hot",)

    def warm_up(self) -> tuple[WarmCosts, WarmCosts]:
        """Settle both sides."""
        return warm_up(self.run_a, self.device), warm_up(self.run_b, self.device)

    def take_samples(self, batch: SampleBatch) -> Pairs:
        """Take the samples of a batch."""
        return sample_bucket(self.run_a, self.run_b, self.device, batch)


def measure(sampler: Sampler, plan: TimingPlan) -> Measurement:
    """Seven buckets for each state of the cache; twice, then `plan.rounds` times as many where they
    disagree, time allows and the disagreement leaves open on which side of `plan.margin` the
    speed-up is: not where its centre is nearer to 1 than to the margin. Of slow calls 3 to 6 pairs
    where these settle that.

    Raises ValueError for samples that mean nothing.
    """
    started = time.monotonic()
    sides = sampler.warm_up()
    batches = {
        l2: _limit_to_budget(plan, batch_for(plan, l2, sides), sides, len(sampler.temperatures))
        for l2 in sampler.temperatures
    }
    pairs: dict[L2, Pairs] = {l2: [] for l2 in batches}
    summaries: dict[L2, PairedSummary] = {}
    for number in range(1, plan.rounds + 1):
        # Only states whose buckets disagree: more pairs do not change what is settled.
        open_states = [l2 for l2 in batches if l2 not in summaries or not summaries[l2].steady]
        for part in _split_round(plan, {l2: batches[l2] for l2 in open_states}, first=number == 1):
            _round(sampler, part, pairs, plan, started)
            summaries |= {l2: summarise(pairs[l2]) for l2 in open_states}
            if _is_plain(plan, pairs, summaries):
                break
        took = time.monotonic() - started
        settled = all(summary.steady for summary in summaries.values()) or _is_decided(
            plan, pairs, summaries
        )
        settled = settled or _is_far_from_margin(plan, summaries)
        # Another round would take about as long as each of those so far.
        if settled or took * (number + 1) / number > plan.budget_s:
            break
    return Measurement(
        plan, summaries, (sides[0].first_us, sides[1].first_us), number, time.monotonic() - started
    )


def _split_round(
    plan: TimingPlan, batches: Mapping[L2, SampleBatch], *, first: bool
) -> Sequence[Mapping[L2, SampleBatch]]:
    """The batches of a round: for a decision by margin the first round in halves, because most
    decisions are plain after one.
    """
    # A, B, B, A needs pairs by two, and a half must hold at least one such block.
    if (
        not first
        or not _stops_at_margin(plan)
        or any(batch.pairs < 4 or batch.pairs % 2 for batch in batches.values())
    ):
        return [batches]
    return 2 * [{l2: replace(batch, pairs=batch.pairs // 2) for l2, batch in batches.items()}]


def _stops_at_margin(plan: TimingPlan) -> bool:
    # Under "reject" all pairs are needed to say whether the buckets agree.
    return plan.margin is not None and plan.gate == "widen"


def _is_plain(
    plan: TimingPlan, pairs: Mapping[L2, Pairs], summaries: Mapping[L2, PairedSummary]
) -> bool:
    """Whether the margin lies outside the range of all buckets, steady or not. This is stricter
    than the interval that decides.
    """
    # A look after half of the pairs is one more chance to err, hence the wider ranges.
    ranges = {
        l2: replace(s, low=min(s.low, *s.values), high=max(s.high, *s.values))
        for l2, s in summaries.items()
    }
    return _is_decided(plan, pairs, ranges)


def _is_decided(
    plan: TimingPlan, pairs: Mapping[L2, Pairs], summaries: Mapping[L2, PairedSummary]
) -> bool:
    """Whether the margin lies outside the interval that decides. That interval is the whole range
    of buckets that disagree.
    """
    if not _stops_at_margin(plan):
        return False
    assert plan.margin is not None
    # One state below is enough, because the lower speed-up decides; above it must be all of them.
    below = any(each.high < plan.margin for each in summaries.values())
    return (
        below
        or all(each.low >= plan.margin for each in summaries.values())
        or _is_hopeless(pairs, plan.margin)
    )


def _is_far_from_margin(plan: TimingPlan, summaries: Mapping[L2, PairedSummary]) -> bool:
    """Whether after a whole round some state's centre is not even half-way to the margin: no lower
    bound will come above it.
    """
    # The interval shrinks with more pairs, but its centre hardly moves.
    return _stops_at_margin(plan) and any(
        each.speedup < 1 + ((plan.margin or 1.0) - 1) / 2 for each in summaries.values()
    )


def _is_hopeless(pairs: Mapping[L2, Pairs], margin: float) -> bool:
    """Whether in some state so many pairs lie below the margin that the median does: a sign test at
    0.5 %. More pairs would only find out by how much.
    """
    below = {l2: sum(a < margin * b for a, b in each) for l2, each in pairs.items()}
    return any(
        # The normal approximation of the sign test: a fair coin's deviation is half the root of the
        # tosses.
        below[l2] >= len(each) / 2 + _SURE * math.sqrt(len(each)) / 2
        for l2, each in pairs.items()
    )


def _is_far_after_few(plan: TimingPlan, pairs: Mapping[L2, Pairs]) -> bool:
    """Whether the first few pairs, of calls so slow that each is a bucket of its own, settle the
    decision already.

    They do where the interval, which allows for several looks, lies below the margin in some state
    of the cache, or in all states above both the margin and the speed-up that a fresh process
    measures again.
    """
    if (
        plan.margin is None
        or not _stops_at_margin(plan)
        or any(not FEWEST_SLOW_PAIRS <= len(p) < FEWEST_PAIRS for p in pairs.values())
    ):
        return False
    # No swap rests on a few pairs of one process: above, another process measures again in any
    # case.
    summaries = [summarise(each) for each in pairs.values()]
    # a score is rounded down to two decimals before it is a surprise
    enough = max(plan.margin, REMEASURED_SPEEDUP + 0.01)
    return any(each.high < plan.margin for each in summaries) or all(
        each.low >= enough for each in summaries
    )


def sample_pairs(
    run_a: Callable[[], object],
    run_b: Callable[[], object],
    device: torch.device,
    *,
    budget_s: float = 10.0,
    margin: float | None = None,
) -> Pairs:
    """Paired samples of two callables in this process, cold on CUDA: (a, b) microseconds per call,
    one tuple a pair.

    56 pairs, fewer (down to 7) where they take longer than `budget_s`; half of them, or down to 3 of
    slow calls, where these tell on which side of `margin` the speed-up is.
    """
    plan = replace(TIMING_PLANS["fast"], budget_s=budget_s, margin=margin)
    l2 = list_l2_states(device, plan)[0]
    sampler = LocalSampler(run_a, run_b, device, (l2,))
    started = time.monotonic()
    sides = sampler.warm_up()
    batches = {l2: _limit_to_budget(plan, batch_for(plan, l2, sides), sides, 1)}
    pairs: dict[L2, Pairs] = {l2: []}
    for part in _split_round(plan, batches, first=True):
        _round(sampler, part, pairs, plan, started)
        if _is_plain(plan, pairs, {l2: summarise(pairs[l2])}):
            break
    return pairs[l2]


def _round(
    sampler: Sampler,
    batches: Mapping[L2, SampleBatch],
    pairs: dict[L2, Pairs],
    plan: TimingPlan,
    started: float,
) -> None:
    """One bucket after the other; past the budget one pair each, so that there are always seven, or
    a few that are far apart.
    """
    begin = time.monotonic()
    for bucket in range(1, BUCKETS + 1):
        until = None if plan.window_s is None else begin + plan.window_s * bucket / BUCKETS
        # In random order, so that neither state always follows the other.
        for l2 in _CHANCE.sample(list(batches), len(batches)):
            # Past the budget one pair each: seven buckets are needed whatever the calls take.
            late = time.monotonic() - started > plan.budget_s
            pairs[l2] += _bucket(
                sampler, replace(batches[l2], pairs=1) if late else batches[l2], until
            )
        if all(batch.pairs < FEWEST_SLOW_PAIRS for batch in batches.values()) and _is_far_after_few(
            plan, pairs
        ):
            return


def _bucket(sampler: Sampler, batch: SampleBatch, until: float | None) -> Pairs:
    """A bucket in requests of bounded size, ended at `until` (on the monotonic clock) if that comes
    first.
    """
    samples: Pairs = []
    at_once = _FIRST
    # The first request is small: it shows what a pair takes.
    while len(samples) < batch.pairs and (until is None or not samples or time.monotonic() < until):
        begin, before = time.monotonic(), len(samples)
        samples += sampler.take_samples(replace(batch, pairs=min(at_once, batch.pairs - before)))
        pair_s = (time.monotonic() - begin) / (len(samples) - before)
        left_s = _AT_ONCE_S if until is None else min(_AT_ONCE_S, until - time.monotonic())
        # An even number, because the A, B, B, A blocks hold two pairs each.
        at_once = max(2, min(_AT_ONCE, int(left_s / max(pair_s, 1e-9)) // 2 * 2))
    return samples


def _limit_to_budget(
    plan: TimingPlan, batch: SampleBatch, sides: tuple[WarmCosts, WarmCosts], states: int
) -> SampleBatch:
    """As many pairs as the budget (or the window) allows, at least one."""
    costs = [side.flushed_us if batch.l2 == "cold" else side.call_us for side in sides]
    pair_s = sum(cost * calls for cost, calls in zip(costs, batch.calls, strict=True)) / 1e6
    # With a window the time ends a bucket, not a count.
    if plan.window_s is not None:
        return replace(batch, pairs=plan.most_pairs)
    fitting = int(plan.budget_s / (BUCKETS * states * max(pair_s, 1e-9)))
    pairs = max(1, min(batch.pairs, fitting))
    # An even number, because the A, B, B, A blocks hold two pairs each.
    return replace(batch, pairs=pairs - pairs % 2 if 1 < pairs < batch.pairs else pairs)
