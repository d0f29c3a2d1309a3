"""Times a source candidate against a baseline in the oracle's process.

The samples are slopes on this process's clock (`judge.benchmark.cross_process`), because the
candidate's Python could patch every clock of its own; the outputs of timed calls are judged like
those of validation. `judge.evaluate.source_evaluator` chooses the baseline and decides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from torch_cudal1.device.peaks import RequiredWork, check_roofline, find_device_peaks
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.benchmark.candidate_timing import (
    BenchmarkResult,
    OutputAudit,
    check_first_call,
    check_stability,
    check_sync_ratio,
    describe_measurement,
)
from torch_cudal1.judge.benchmark.cross_process import (
    ChildBatchTimer,
    CrossProcessBenchmark,
    limit_batch_calls,
)
from torch_cudal1.judge.benchmark.paused_processes import PausableProcesses, UndisturbedTimer
from torch_cudal1.judge.benchmark.protocol import Measurement, Pairs, measure
from torch_cudal1.judge.benchmark.same_core import SameCore, share_core
from torch_cudal1.judge.benchmark.timing import L2, SampleBatch, WarmCosts
from torch_cudal1.judge.benchmark.timing_plan import TimingPlan
from torch_cudal1.judge.benchmark.unseen_inputs import check_unseen_inputs
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure

__all__ = ["check_first_calls", "time_source"]

_SECOND_INSTANCE = "first_call"
# Where disagreement widens the interval and refuses no candidate, the clock must not take what a
# candidate may take in all (3 s on a GPU, 10 on a CPU): a second round comes only where both fit
# in, and past this time a bucket has one pair.
_ROUNDS = 2
_WIDEN_S = {"cuda": 1.6, "cpu": 5.0}
# Calls of which the outputs are judged, in batches of so many, and seconds for those that no sample
# needs.
_JUDGED_CALLS, _JUDGED_BATCH, _JUDGED_S = 400, 64, 2.0


@dataclass
class _AuditedSampler:
    """A cross-process benchmark as a `Sampler`, one output of each bucket's last batch judged."""

    benchmark: CrossProcessBenchmark
    timer: ChildBatchTimer
    audit: OutputAudit
    sides: Sequence[PausableProcesses] = ()
    core: SameCore | None = None
    temperatures: tuple[L2, ...] = field(default=("hot",))

    def warm_up(self) -> tuple[WarmCosts, WarmCosts]:
        """Settle both sides. Raises CandidateFailure."""
        self._list_processes()
        self._move()
        return self.benchmark.warm_up()

    def take_samples(self, batch: SampleBatch) -> Pairs:
        """Samples of a batch; then one of its calls is judged. Raises CandidateFailure."""
        self.timer.shift = self.audit.shift()
        self._list_processes()
        # The first call on another core finds cold caches: it is not timed.
        if self._move():
            self.benchmark.settle()
        pairs = self.benchmark.take_samples(batch)
        # After each bucket: a candidate that answers wrongly later, when it takes itself for timed,
        # is found.
        self.audit.check_output(self.timer.start, self.timer.shift, self.timer.held_outputs)
        return pairs

    def _list_processes(self) -> None:
        # Between batches: reading them takes milliseconds, and a candidate may have started some.
        for processes in self.sides:
            processes.list_again()

    def _move(self) -> bool:
        return self.core is not None and self.core.move()


def time_source(trial: Trial, baseline: ChildBatchTimer, plan: TimingPlan) -> BenchmarkResult:
    """Measure slot "candidate" of the trial's child against a slot of another child, on input sets
    drawn now.

    Raises CandidateFailure.
    """
    # Frees what validation kept before new sets are made.
    trial.drop_large_sets()
    # New inputs, after validation: answers kept from the sets that were validated are wrong here.
    fresh = replace(trial, samples={}, results={}, reference_cache={})
    for _ in range(2):
        fresh.draw("normal")
    audit = OutputAudit(fresh, plan)  # as many outputs are looked at, however short the benchmark
    if plan.gate == "widen":
        seconds = min(plan.budget_s, _WIDEN_S[trial.device.type])
        plan = replace(plan, rounds=min(plan.rounds, _ROUNDS), budget_s=seconds)
    timer = ChildBatchTimer(
        trial.child, "candidate", audit.sets, limit_batch_calls(audit.output_bytes, trial.device)
    )
    # What a batch keeps costs memory that a discarded result does not: both sides pay it.
    other = replace(baseline, keep=True, max_calls=timer.max_calls)
    # Neither side runs while the other one is timed.
    sides = [PausableProcesses(side.child.pid) for side in (timer, other)]
    benchmark = CrossProcessBenchmark(*map(UndisturbedTimer, (other, timer), sides))
    started = time.monotonic()
    # Beside other work one kernel was 1.5 times as fast as itself on two cores of different speed.
    with _share_gpu_host_core(baseline, timer, trial.device) as core:
        try:
            measurement = measure(_AuditedSampler(benchmark, timer, audit, sides, core), plan)
            _judge_more_calls(timer, audit)
        except ValueError as error:
            raise CandidateFailure("timing", f"unusable samples: {error}", "protocol") from error
        facts = describe_measurement(measurement) | {"one_core": core is not None and core.shared}
    written = RequiredWork(0.0, 4, audit.output_bytes)  # of a source only the results are known
    bound = check_roofline(written, find_device_peaks(trial.device), measurement.summary.b_us)
    checks = [
        audit.check(),
        # The outputs of timed calls come first: times of wrong answers mean nothing.
        benchmark.check(),
        check_first_calls(trial, measurement, audit.sets),
        *check_stability(measurement),
        bound,
    ]
    checks.append(check_unseen_inputs(trial.child, "candidate", audit.sets))
    if trial.device.type == "cuda":
        checks += check_sync_ratio(trial.child.call("look", slot="candidate", sets=audit.sets))
    fresh.drop(*list(fresh.samples.values()))
    return BenchmarkResult(
        measurement, tuple(checks), facts | {"seconds": time.monotonic() - started}
    )


def _judge_more_calls(timer: ChildBatchTimer, audit: OutputAudit) -> None:
    """Batches like the timed ones, of which the outputs are judged, until some hundreds are. Raises
    CandidateFailure.
    """
    # On a busy machine the measurement ends with few calls, among which a fault of one in ten hides.
    ends = time.monotonic() + _JUDGED_S
    while audit.equal_calls < _JUDGED_CALLS and time.monotonic() < ends:
        timer.shift = audit.shift()
        timer.time_batch(min(timer.max_calls, _JUDGED_BATCH))
        audit.judge_batch(timer.start, timer.shift, timer.held_outputs)


def _share_gpu_host_core(
    a: ChildBatchTimer, b: ChildBatchTimer, device: torch.device
) -> AbstractContextManager[SameCore | None]:
    """The hosts of a GPU on one core; what runs on the cores themselves needs all of them."""
    return share_core((a.child.pid, b.child.pid)) if device.type == "cuda" else nullcontext()


def check_first_calls(trial: Trial, measurement: Measurement, sets: Sequence[str]) -> CheckResult:
    """`timing_state`. A first call that took too long is not held against a candidate whose next
    instance starts fast. Raises CandidateFailure.
    """
    check = check_first_call(measurement)
    if check.passed:
        return check
    # A kernel that was compiled stays in the process, so a second instance starts fast. Work that
    # each instance does in its first call comes again.
    # One right program was refused for a first call of over 250 ms, so a slow one is asked again.
    trial.load(_SECOND_INSTANCE, trial.candidate)
    again_us = (
        # One call, and its output is dropped: a new instance's first call is all that is asked
        # about.
        ChildBatchTimer(trial.child, _SECOND_INSTANCE, sets, 1, keep=False).time_batch(1).wall_s
        * 1e6
    )
    trial.child.call("forget", slot=_SECOND_INSTANCE)
    return check_first_call(
        replace(
            measurement,
            first_call_us=(
                measurement.first_call_us[0],
                min(again_us, measurement.first_call_us[1]),
            ),
        )
    )
