"""Times a candidate: samples of two slots of its child, and a comparison of what timed calls
answered.

The child takes the samples, which is enough for Programs: they are data, and no Python of
a candidate runs beside the clock. The slope over whole batches is checked on this process's clock all the same. For
a source, whose Python could patch the clock, `judge.benchmark.cross_process` is the sampler. Which
baseline, and what follows from it, is the evaluator's.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.benchmark.cross_process import (
    ChildBatchTimer,
    check_wall_slope,
    measure_slope,
)
from torch_cudal1.judge.benchmark.protocol import Measurement, Pairs, measure
from torch_cudal1.judge.benchmark.quoted_speedup import Unstable, score_measurement
from torch_cudal1.judge.benchmark.rotating_inputs import plan_rotation
from torch_cudal1.judge.benchmark.timing import L2, SampleBatch, WarmCosts, list_l2_states
from torch_cudal1.judge.benchmark.timing_plan import TimingPlan
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.output_comparison import compare_outputs
from torch_cudal1.judge.reference.region_reference import Outputs
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure

__all__ = [
    "BenchmarkResult",
    "OutputAudit",
    "SlotSampler",
    "check_first_call",
    "check_stability",
    "check_sync_ratio",
    "describe_measurement",
    "time_program",
]

_HEAVY_FLOPS = 2e11  # on the CPU a float64 run of this takes seconds
# Outputs that a batch keeps in the child, of which one is judged.
_KEPT_BYTES, _MOST_KEPT = 256 << 20, 8
# Seconds a batch for the comparison of its outputs with one another.
_EQUAL_S = 0.02
_AUDIT_SHARE = 0.1  # of the time budget
_SLOPE_US = 20_000.0
_SLOPES = (3, 3, 5, 7, 9, 9)  # of each try
_LONGEST_BATCHES = 3  # how often batches become twice as long
_SLOW_US = 300_000.0  # one slope of a call this long says enough
_FIRST_US, _FIRST_OVER_BASELINE, _FIRST_OVER_STEADY = 250_000.0, 20.0, 100.0
_MOST_SYNC_RATIO = 1.5  # as in CUDA-L2's defence


@dataclass(frozen=True)
class BenchmarkResult:
    """A measurement with its checks, of which one may have failed, and the facts beside it (JSON)."""

    measurement: Measurement
    checks: tuple[CheckResult, ...]
    facts: Mapping[str, Any]


@dataclass
class OutputAudit:
    """Judges outputs of timed calls as validation did. Which call is looked at is drawn after the
    batch has ended.

    A rotating set has the parameters and buffers of the first sample and the values of one of both.
    """

    trial: Trial
    plan: TimingPlan
    compared_calls: int = 0
    equal_calls: int = 0
    spent_s: float = 0.0
    samples: dict[int, InputSet] = field(default_factory=dict)

    @property
    def sets(self) -> list[str]:
        """The rotating input sets, by their names in the child."""
        return [sample.name for sample in self.trial.first_two]

    @property
    def rotation(self) -> tuple[int, bool]:
        """How many sets rotate, and whether their values do."""
        return plan_rotation(self.trial.first_two[0].inputs, self._static, len(self.sets))

    @property
    def output_bytes(self) -> int:
        """Of one call."""
        outputs = self.trial.first_two[0].expected.outputs
        return sum(out.numel() * out.element_size() for out in outputs if out is not None)

    def shift(self) -> int:
        """How far to rotate the values next."""
        # Secret: a candidate that knew which values come next could have the answers ready.
        return secrets.randbelow(len(self.sets)) if self.rotation[1] else 0

    def is_due(self) -> bool:
        """Whether another output is to be compared: at least one, then while the plan wants more
        and comparing takes little of the budget.
        """
        # At least one, whatever it costs: a score needs evidence that the timed calls computed.
        return not self.compared_calls or (
            self.compared_calls < 4 * self.plan.outputs
            and self.spent_s < _AUDIT_SHARE * self.plan.budget_s
        )

    def check_output(self, start: int, shift: int, held_outputs: int) -> None:
        """`judge_batch`, if it is due."""
        if held_outputs and self.is_due():
            self.judge_batch(start, shift, held_outputs)

    def judge_batch(self, start: int, shift: int, held_outputs: int) -> None:
        """Judge two of the `held_outputs` outputs of calls that began on input set `start`, and
        compare the others with them. Raises CandidateFailure("timed_output").
        """
        # Drawn after the batch has ended: while it runs no candidate can know which of its calls is
        # judged, so it cannot be right in that one only.
        started = time.monotonic()
        index = secrets.randbelow(held_outputs)
        # Two calls: what is read now may have been written since; what the child copied when the
        # clock stopped was the child's to draw.
        copied_index, copied = self.trial.read_copied()
        if not 0 <= copied_index < held_outputs:
            raise CandidateFailure("timing", f"call {copied_index} of {held_outputs}", "protocol")
        # Named before they are looked at in full: a fault of one call in hundreds is in none of two.
        odd_calls = self._find_unlike(start, shift, index, held_outputs)
        for number, outputs in (
            (copied_index, copied),
            *((each, self.trial.reread(each)) for each in (index, *odd_calls)),
        ):
            place = (start + number) % self.rotation[0]
            sample = self._sample((place + shift) % len(self.sets))
            self._compare(sample, outputs)
        # The comparison makes float64 copies, beside which the next batch may not fit into the
        # GPU's memory.
        self.trial.free_memory_if_short()
        self.compared_calls += 1
        self.spent_s += time.monotonic() - started

    def _find_unlike(self, start: int, shift: int, judged: int, held_outputs: int) -> list[int]:
        """The calls of the batch whose outputs are those of no judged call, as far as time allows."""
        answer = self.trial.child.call(
            "unlike",
            start=start,
            shift=shift,
            judged=judged,
            ring=self.rotation[0],
            contents=len(self.sets),
            limit_s=_EQUAL_S,
        )
        try:
            self.equal_calls += int(answer["compared"])
            odd_calls = [int(number) for number in answer["unlike"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CandidateFailure("timing", f"an unusable answer: {error}", "protocol") from error
        if any(not 0 <= number < held_outputs for number in odd_calls):
            raise CandidateFailure("timing", f"calls {odd_calls} of {held_outputs}", "protocol")
        return odd_calls

    def _compare(self, sample: InputSet, outputs: Outputs) -> None:
        for position, comparison in compare_outputs(self.trial, sample, outputs):
            if not comparison.passed:
                raise CandidateFailure(
                    "timing",
                    f"a timed call answered wrongly: output {position}: {_describe_comparison(comparison)}",
                    "timed_output",
                )

    def check(self) -> CheckResult:
        """What was looked at; to look at nothing is a failure."""
        return CheckResult(
            "timed_output",
            # A measurement of which no output was judged says nothing of what was timed.
            self.compared_calls > 0,
            float(self.compared_calls),
            None,
            f"{self.compared_calls} timed calls answered rightly, "
            f"{self.equal_calls} were compared with those bit by bit",
        )

    @property
    def _static(self) -> frozenset[int]:
        return frozenset(
            index for index, role in enumerate(self.trial.reference.roles) if role != "input"
        )

    def _sample(self, content: int) -> InputSet:
        if content not in self.samples:
            first, other = self.trial.first_two[0], self.trial.first_two[content]
            self.samples[content] = first if content == 0 else self._mix_sets(first, other)
        return self.samples[content]

    def _mix_sets(self, first: InputSet, other: InputSet) -> InputSet:
        # Without parameters the two sets are whole as they are.
        if not self._static:
            return other
        # As in a model: the parameters stay while the inputs change. So this set is in neither
        # sample, and its reference must be computed anew.
        inputs = [
            (first if i in self._static else other).inputs[i] for i in range(len(first.inputs))
        ]
        heavy = self.trial.device.type == "cpu" and self.trial.facts.flops > _HEAVY_FLOPS
        exact = (
            (lambda inputs: Refusal("too much work to repeat here"))
            if heavy
            else self.trial.reference.exact
        )
        return InputSet(other.name, other.distribution, inputs, self.trial.reference.eager, exact)


@dataclass
class SlotSampler:
    """Slots "baseline" and "candidate" of one child as a `Sampler`, the candidate's outputs audited
    bucket by bucket.
    """

    audit: OutputAudit
    temperatures: tuple[L2, ...]
    persisting_note: str = ""  # why the L2 cache's persisting lines were not reset

    def warm_up(self) -> tuple[WarmCosts, WarmCosts]:
        """Settle both slots. Raises CandidateFailure."""
        answer = self.audit.trial.child.call(
            "warm", a="baseline", b="candidate", sets=self.audit.sets
        )
        # The answer is another process's data: whatever else it holds is a failure of the protocol.
        try:
            self.persisting_note = str(answer["reset"])
            a, b = (WarmCosts(*map(float, side)) for side in answer["warm"])
        except (KeyError, TypeError, ValueError) as error:
            raise _refuse_samples(error) from error
        return a, b

    def take_samples(self, batch: SampleBatch) -> Pairs:
        """Samples of a batch; then one of its calls is judged. Raises CandidateFailure."""
        audit, shift = self.audit, self.audit.shift()
        keep = (
            max(1, min(_MOST_KEPT, _KEPT_BYTES // max(1, audit.output_bytes)))
            if audit.is_due()
            else 0
        )
        answer = audit.trial.child.call(
            "time", sets=audit.sets, shift=shift, batch=asdict(batch), keep=keep
        )
        try:
            pairs = [(float(a), float(b)) for a, b in answer["pairs"]]
            held_outputs, end = int(answer["kept"]), int(answer["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise _refuse_samples(error) from error
        # Fewer pairs than asked for could be the fast ones only.
        if len(pairs) != batch.pairs:
            raise CandidateFailure(
                "timing", f"{len(pairs)} pairs, expected {batch.pairs}", "protocol"
            )
        audit.check_output(end - held_outputs, shift, held_outputs)
        return pairs


def time_program(trial: Trial, plan: TimingPlan) -> BenchmarkResult:
    """Measure slot "candidate" against slot "baseline" of the trial's child. Raises
    CandidateFailure.
    """
    audit = OutputAudit(trial, plan)
    slots = SlotSampler(audit, list_l2_states(trial.device, plan))
    try:
        measurement = measure(slots, plan)
    # `measure` refuses times that are not positive.
    except ValueError as error:
        raise _refuse_samples(error) from error
    sides = trial.child.call("look")
    checks = [
        audit.check(),
        _check_child_clock(trial, audit, measurement),
        *check_sync_ratio(sides),
        *check_stability(measurement),
    ]
    # Frees the outputs which the last batch kept.
    trial.child.call("drop", names=[])
    return BenchmarkResult(
        measurement,
        tuple(checks),
        describe_measurement(measurement)
        | {"sides": {"baseline": sides.get("a"), "candidate": sides.get("b")}},
    )


def check_stability(measurement: Measurement) -> list[CheckResult]:
    """`unstable`, once for each state of the cache: whether the measurement has a score at all."""
    checks = []
    # Each state by itself: only the lower speed-up decides, but it must not be the one without a
    # score.
    for l2, summary in measurement.summaries.items():
        answer = score_measurement(summary, measurement.plan)
        if isinstance(answer, Unstable):
            checks.append(
                CheckResult(
                    "unstable", False, answer.value, answer.limit, f"{l2} L2: {answer.reason}"
                )
            )
        else:
            spread = max(summary.values) / min(summary.values)
            note = (
                "" if summary.steady else "; the buckets disagree, so their range is the interval"
            )
            checks.append(
                CheckResult(
                    "unstable", True, spread, None, f"{l2} L2: largest over smallest bucket{note}"
                )
            )
    return checks


def check_first_call(measurement: Measurement) -> CheckResult:
    """`timing_state`: no work of later calls is done in an instance's first call, which no sample
    holds. A candidate that compiles anew for each instance is refused too.
    """
    candidate_us, baseline_us = measurement.first_call_us[1], measurement.first_call_us[0]
    # The baseline's first call, its input sets included, shows how slow this machine starts; 100
    # calls show what a slow candidate needs.
    limit_us = max(
        _FIRST_US, _FIRST_OVER_BASELINE * baseline_us, _FIRST_OVER_STEADY * measurement.summary.b_us
    )
    return CheckResult(
        "timing_state",
        candidate_us <= limit_us,
        candidate_us,
        limit_us,
        "microseconds of a new instance's first call",
    )


def describe_measurement(measurement: Measurement) -> dict[str, Any]:
    """A measurement as JSON."""
    states = {
        l2: {
            "speedup": s.speedup,
            "low": s.low,
            "high": s.high,
            "us": [s.a_us, s.b_us],
            "pairs": s.pairs,
            "steady": s.steady,
        }
        | {"buckets": list(s.values)}
        for l2, s in measurement.summaries.items()
    }
    first = dict(zip(("baseline", "candidate"), measurement.first_call_us, strict=True))
    return {
        "l2": states,
        "decided_by": measurement.deciding,
        "first_call_us": first,
        "rounds": measurement.rounds,
        "seconds": measurement.seconds,
    }


def _check_child_clock(trial: Trial, audit: OutputAudit, measurement: Measurement) -> CheckResult:
    """`wall_slope`: what the child's clock says of whole batches, against this process's clock."""
    # The child runs whole batches back to back, which is the hot state.
    cost_us = measurement.summaries["hot"].b_us
    timer = ChildBatchTimer(trial.child, "candidate", audit.sets, keep=False)
    timer.time_batch(1)  # makes the rotating sets
    # Noise passes on a later try with longer batches, on a machine with other work perhaps on
    # the last one only; a false clock is as far off in each.
    for attempt, count in enumerate(_SLOPES):
        # Twice as many calls a try: the error of the request's time is divided by more calls.
        calls = math.ceil(_SLOPE_US / cost_us) << min(attempt, _LONGEST_BATCHES)
        answer = check_wall_slope(
            [measure_slope(timer, calls) for _ in range(1 if cost_us > _SLOW_US else count)]
        )
        if answer.passed:
            break
    return answer


def check_sync_ratio(sides: Mapping[str, Any]) -> list[CheckResult]:
    """`sync_ratio` of the candidate; none without a device clock."""
    try:
        ratio = sides["b"]["sync_ratio"]
        # No device clock, as on a CPU.
        if ratio is None:
            return []
        return [
            CheckResult(
                "sync_ratio",
                float(ratio) <= _MOST_SYNC_RATIO,
                float(ratio),
                _MOST_SYNC_RATIO,
                "all streams joined, over its own",
            )
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _refuse_samples(error) from error


def _describe_comparison(comparison: Any) -> str:
    return comparison.detail or f"error ratio {comparison.ratio} over {comparison.limit}"


def _refuse_samples(error: Exception) -> CandidateFailure:
    return CandidateFailure("timing", f"unusable samples: {error}", "protocol")
