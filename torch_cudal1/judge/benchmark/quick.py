"""Quick paired benchmark of two processes, for rewards: each side times its own batches, this
process's clock then says whether to believe it.

`judge.benchmark.cross_process` reads only the parent's clock, so every sample must drown the jitter
of a request: over a second for one candidate, which is too long where thousands are measured. Here
a sample is as short as the timing plan says, read by the C++ clock in the child, or off the GPU's
own where `baseline.queued` asks for that; and one slope on the parent's clock at the end must tell
the same time per call as the child's wall clock (`check_wall_slope`). A candidate that lies about
time by under 10 % gets by: a reward may hold that, a decision to swap may not, so nothing but
training uses this.

A benchmark needs the device alone, and all other processes wait for it. So the steps that can run
beside other work come before it (making the input sets and warming calls, `prepare_benchmark`) or,
where both sides are code of this package, after it (judging outputs of timed calls and comparing
clocks, `PreparedBenchmark.run_concurrent_checks`).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch_cudal1.device.peaks import RequiredWork, check_roofline, find_device_peaks
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.benchmark.candidate_timing import (
    BenchmarkResult,
    OutputAudit,
    check_stability,
    check_sync_ratio,
    describe_measurement,
)
from torch_cudal1.judge.benchmark.cross_process import (
    ChildBatchTimer,
    check_wall_slope,
    limit_batch_calls,
    measure_slope,
)
from torch_cudal1.judge.benchmark.protocol import Pairs, measure
from torch_cudal1.judge.benchmark.source_timing import check_first_calls
from torch_cudal1.judge.benchmark.timing import L2, SampleBatch, WarmCosts, draw_leading_sides
from torch_cudal1.judge.benchmark.timing_plan import BUCKETS, TimingPlan
from torch_cudal1.judge.benchmark.unseen_inputs import check_unseen_inputs
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure

__all__ = ["CLOCK_CHECKS", "PreparedBenchmark", "QuickBenchmark", "prepare_benchmark"]

CLOCK_CHECKS = (
    "wall_slope",
    "sync_ratio",
    "unseen_inputs",
)  # checks that others on the device can disturb

_LOOKS = 2  # of seven buckets
_WARM_CALLS = 3
# as many as batches of queued calls have: memory for what they keep is there before the benchmark,
# to grow takes 20 ms
_GROWN_CALLS = 8
_KEPT_BYTES = 1 << 30  # results of one batch: many lanes share the device's memory
_WARM_US, _WARM_QUEUED_US = 1_000.0, 150.0  # a batch this long says what a call costs
_SPARE = 1.25  # a first guess this much longer is seldom too short
_SLOPE_US = 4_000.0
_LAUNCH_US = 50.0  # of the host, which a benchmark of queued calls does not measure
# of each try; batches twice as long each time, as far as what they keep allows
_SLOPES = (1, 3, 5, 9, 9, 9)
_LONGEST_BATCHES = 3  # how often they become twice as long


@dataclass
class QuickBenchmark:
    """Two batch timers as a `Sampler`, baseline first, each on its own process's clock, or slots of
    one child, which takes all buckets at one request. `audit` looks at outputs of timed calls.

    Every batch keeps its outputs, so that none can be left out; which few are looked at is drawn
    here. `settled`: what `settle` learned of each side before the device was this benchmark's
    alone.
    """

    baseline: ChildBatchTimer
    candidate: ChildBatchTimer
    audit: OutputAudit
    temperatures: tuple[L2, ...] = field(default=("hot",))
    checked_buckets: set[int] = field(
        default_factory=lambda: set(random.SystemRandom().sample(range(BUCKETS), _LOOKS))
    )
    warm_costs: tuple[WarmCosts, WarmCosts] | None = None
    settled: tuple[_SettledCosts, _SettledCosts] | None = None
    _bucket: int = 0
    _prefetched: Pairs = field(default_factory=list)

    @property
    def shares_child(self) -> bool:
        """Whether both sides are slots of one child: only code of this package shares one."""
        # A source has a child of its own, so a shared one runs nothing but Programs.
        return self.baseline.child is self.candidate.child

    def restart(self) -> QuickBenchmark:
        """Another benchmark of the same two sides, which are warm: outputs to compare are drawn
        anew, at least one.
        """
        # Each measurement must have an output judged, whatever earlier ones had.
        audit = replace(self.audit, compared_calls=0, spent_s=0.0)
        return QuickBenchmark(
            self.baseline,
            self.candidate,
            audit,
            self.temperatures,
            settled=self.settled,
            warm_costs=self.warm_costs,
        )

    def settle(self) -> tuple[_SettledCosts, _SettledCosts]:
        """Let both sides make their rings of inputs and have their first calls, beside other
        work.

        Raises CandidateFailure.
        """
        self.settled = _settle_side(self.baseline), _settle_side(self.candidate)
        return self.settled

    def warm_up(self) -> tuple[WarmCosts, WarmCosts]:
        """Batches of growing length, in the first benchmark of the two. Raises CandidateFailure."""
        # Both sides are warm after the first benchmark of the two.
        if self.warm_costs is None:
            a, b = self.settled or self.settle()
            self.warm_costs = (
                _measure_call_cost(self.baseline, a),
                _measure_call_cost(self.candidate, b),
            )
        return self.warm_costs

    def take_samples(self, batch: SampleBatch) -> Pairs:
        """Pairs of batches, A B B A or B A A B; of some buckets one output is judged, but where
        both sides are in one child, whose last outputs are judged after it (`check_last_outputs`).
        Raises CandidateFailure.
        """
        # One child means one request for all buckets: other processes wait for the device
        # meanwhile.
        if self.shares_child:
            return self._sample_together(batch)
        self.candidate.shift = self.audit.shift()
        pairs = self._sample_in_separate_batches(draw_leading_sides(batch), batch)
        # Which buckets is drawn here, so no candidate knows when its outputs are looked at.
        if self._bucket in self.checked_buckets:
            self._check_output()
        self._bucket += 1
        return pairs

    def check_last_outputs(self) -> None:
        """Judge some outputs of the last batch, which came after most calls. Raises
        CandidateFailure.
        """
        for _ in range(_LOOKS):
            self._check_output()

    def _check_output(self) -> None:
        self.audit.check_output(
            self.candidate.start, self.candidate.shift, self.candidate.held_outputs
        )

    def _sample_in_separate_batches(self, leads: Sequence[int], batch: SampleBatch) -> Pairs:
        pairs: Pairs = []
        for first in leads:
            costs = {
                side: self._measure_cost_us(side, batch.calls[side]) for side in (first, 1 - first)
            }
            pairs.append((costs[0], costs[1]))
        return pairs

    def _sample_together(self, batch: SampleBatch) -> Pairs:
        """A bucket of the pairs that one request has taken for all of them: all other
        processes wait for each request.
        """
        if len(self._prefetched) < batch.pairs:
            self.candidate.shift = self.audit.shift()
            self._prefetched = self._request_pairs(
                [lead for _ in range(BUCKETS) for lead in draw_leading_sides(batch)], batch
            )
        pairs, self._prefetched = self._prefetched[: batch.pairs], self._prefetched[batch.pairs :]
        return pairs

    def _request_pairs(self, leads: Sequence[int], batch: SampleBatch) -> Pairs:
        candidate = self.candidate
        calls = [min(count, candidate.max_calls) for count in batch.calls]
        begin = time.monotonic()
        answer = candidate.child.call(
            "pairs",
            slots=[self.baseline.slot, candidate.slot],
            sets=list(candidate.sets),
            shift=candidate.shift,
            calls=calls,
            leads=list(leads),
            queued=candidate.queued,
        )
        wall_us = (time.monotonic() - begin) * 1e6
        pairs = [(float(a), float(b)) for a, b in answer["pairs"]]
        # The calls took place inside the request: a child that claims more time than it took has a
        # false clock.
        claimed_us = sum(a * calls[0] + b * calls[1] for a, b in pairs)
        if (
            len(pairs) != len(leads)
            or not all(min(pair) > 0 for pair in pairs)
            or claimed_us > wall_us
        ):
            raise CandidateFailure(
                "timing",
                f"{pairs[:BUCKETS]} told of a request that took {wall_us:.0f} us",
                "wall_slope",
            )
        candidate.start, candidate.held_outputs = int(answer["start"]), calls[1]
        return pairs

    def _measure_cost_us(self, side: int, calls: int) -> float:
        timer = (self.baseline, self.candidate)[side]
        timed = timer.time_batch(min(calls, timer.max_calls))
        # The batch ran inside the request: a longer time, or none, is a false clock.
        if not 0 < timed.claimed_us <= timed.wall_s * 1e6:
            problem = f"{timed.claimed_us} us told of a request that took {timed.wall_s * 1e6:.0f}"
            raise CandidateFailure("timing", problem, "wall_slope")
        return timed.claimed_us / timed.calls


@dataclass
class PreparedBenchmark:
    """Two sides that have begun, to be measured as often as a caller wants.
    `has_concurrent_checks`: what was measured is to be examined after that, beside others; else
    that is part of measuring it.
    """

    benchmark: QuickBenchmark
    trial: Trial
    plan: TimingPlan

    @property
    def has_concurrent_checks(self) -> bool:
        """Whether both sides are code of this package."""
        return self.benchmark.shares_child

    def measure(self) -> BenchmarkResult:
        """One measurement, for which the device must be this one's alone. A caller that is not
        content with it calls again: only the samples are taken once more. Raises CandidateFailure.
        """
        started = time.monotonic()
        # The sides stay warm; which outputs are judged is drawn anew.
        self.benchmark = benchmark = self.benchmark.restart()
        try:
            measurement = measure(benchmark, self.plan)
        except ValueError as error:
            raise CandidateFailure("timing", f"unusable samples: {error}", "protocol") from error
        bound = check_roofline(
            # Of a source nothing is known but its results: each must be written at least once.
            RequiredWork(0.0, 4, benchmark.audit.output_bytes),
            find_device_peaks(self.trial.device),
            measurement.summary.b_us,
        )
        checks = [
            check_first_calls(self.trial, measurement, benchmark.audit.sets),
            *check_stability(measurement),
            bound,
        ]
        timed = BenchmarkResult(
            measurement,
            tuple(checks),
            describe_measurement(measurement) | {"seconds": time.monotonic() - started},
        )
        # A source's process may do something else as soon as it is left alone, so its checks are
        # part of the measurement.
        return timed if self.has_concurrent_checks else self.run_concurrent_checks(timed)

    def run_concurrent_checks(self, timed: BenchmarkResult) -> BenchmarkResult:
        """The last measurement with the checks that can run beside other work: outputs of timed
        calls, the process's clock, joined streams. Raises CandidateFailure.
        """
        if self.has_concurrent_checks:
            self.benchmark.check_last_outputs()
        return replace(
            timed, checks=(*timed.checks, self.benchmark.audit.check(), *self._check_clocks(timed))
        )

    def recheck_clocks(self, timed: BenchmarkResult) -> BenchmarkResult:
        """What was examined, its clocks compared anew: for a moment without others, who may have
        disturbed them.
        """
        # Everything but the clocks stands as it was found: only these can be disturbed by others.
        others = [check for check in timed.checks if check.name not in CLOCK_CHECKS]
        return replace(timed, checks=(*others, *self._check_clocks(timed)))

    def _check_clocks(self, timed: BenchmarkResult) -> list[CheckResult]:
        candidate, checks = (
            self.benchmark.candidate,
            [_check_child_clock(self.benchmark.candidate, timed.measurement.summary.b_us)],
        )
        sets = self.benchmark.audit.sets
        if not self.benchmark.shares_child:
            checks.append(check_unseen_inputs(candidate.child, candidate.slot, sets))
        if self.trial.device.type == "cuda":
            checks += check_sync_ratio(candidate.child.call("look", slot=candidate.slot, sets=sets))
        return checks


def prepare_benchmark(
    trial: Trial, baseline: ChildBatchTimer, plan: TimingPlan
) -> PreparedBenchmark:
    """Draw the inputs for slot "candidate" of the trial's child and for a slot of another child (or
    of the same one, where both sides are code of this package), call both sides first, and compute
    the results that outputs are compared with.

    Raises CandidateFailure.
    """
    # New inputs, after validation: answers kept from the sets that were validated are wrong here.
    fresh = replace(trial, samples={}, results={}, reference_cache={})
    for _ in range(2):
        fresh.draw("normal")
    audit = OutputAudit(fresh, plan)
    calls = min(
        limit_batch_calls(audit.output_bytes, trial.device),
        max(2, _KEPT_BYTES // max(1, audit.output_bytes)),
    )
    timer = ChildBatchTimer(
        trial.child, "candidate", audit.sets, calls, drops_inline=True, queued=baseline.queued
    )
    # what is kept costs memory: both sides pay
    other = replace(baseline, keep=True, max_calls=timer.max_calls, drops_inline=True)
    # In one child both sides can use the same sets, and their memory is taken once.
    if baseline.child is trial.child:
        other.sets = audit.sets
    benchmark = QuickBenchmark(other, timer, audit)
    benchmark.settle()
    # Before the benchmark: float64 runs would keep other processes off the device.
    _compute_references(fresh)
    return PreparedBenchmark(benchmark, fresh, plan)


def _compute_references(trial: Trial) -> None:
    """Have both sets' results computed: both keep them."""
    for sample in trial.first_two:
        _ = sample.expected
        # The `kernelbench` contract compares with eager only.
        if trial.contract.precision != "kernelbench":
            _ = sample.exact


def _check_child_clock(timer: ChildBatchTimer, cost_us: float) -> CheckResult:
    """`wall_slope`: the child's clock against this process's, in longer batches at each try."""
    # Without `queued` the child's own wall clock is read, which is what the parent's can be
    # compared with.
    separate_timer = replace(timer, drops_inline=False, queued=False)
    if timer.queued:
        cost_us = max(cost_us, _LAUNCH_US)
    # Noise passes on a later try, with longer batches and the median of more of them; a false clock
    # on none.
    for attempt, count in enumerate(_SLOPES):
        slopes = [
            measure_slope(
                separate_timer, math.ceil(_SLOPE_US / cost_us) << min(attempt, _LONGEST_BATCHES)
            )
            for _ in range(count)
        ]
        answer = check_wall_slope(slopes)
        if answer.passed:
            break
    return answer


@dataclass(frozen=True)
class _SettledCosts:
    """Microseconds of a side's first call, and of one of a few later ones, by its own clock and
    beside others.
    """

    first_us: float
    later_us: float


def _settle_side(timer: ChildBatchTimer) -> _SettledCosts:
    # The first call makes the rotating sets and compiles; both are in this time.
    first_us = timer.time_batch(1).wall_s * 1e6
    later = timer.time_batch(min(_GROWN_CALLS if timer.queued else _WARM_CALLS, timer.max_calls))
    return _SettledCosts(first_us, later.claimed_us / later.calls)


def _measure_call_cost(timer: ChildBatchTimer, settled: _SettledCosts) -> WarmCosts:
    """What a call costs, from a batch that is long enough: one request, where the guess was right."""
    wanted_us = _WARM_QUEUED_US if timer.queued else _WARM_US
    # A guess from calls beside other work: mostly too long, so one batch is enough.
    calls = max(1, min(timer.max_calls, math.ceil(_SPARE * wanted_us / max(settled.later_us, 0.1))))
    while True:
        timed = timer.time_batch(calls)
        cost_us = timed.claimed_us / calls
        if timed.claimed_us >= wanted_us or 2 * calls > timer.max_calls:
            return WarmCosts(settled.first_us, cost_us, cost_us)
        calls *= 2
