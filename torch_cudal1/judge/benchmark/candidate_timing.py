"""A candidate on trial against the clock: samples of two slots of its child, and what its timed
calls answered.

The child takes the samples, which is enough for Programs: they are data, and nothing of theirs runs
beside the clock. The slope over whole batches is checked on this process's clock all the same. For
a source, whose Python could patch the clock, `judge.benchmark.cross_process` is the sampler. Which
baseline, and what follows from it, is the court's.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_cudal1.ir.records import Check
from torch_cudal1.judge.benchmark.cross_process import ChildSpinner, slope, wall_slope
from torch_cudal1.judge.benchmark.protocol import Measurement, Pairs, measure
from torch_cudal1.judge.benchmark.rotating_inputs import plan_ring
from torch_cudal1.judge.benchmark.timing import L2, Batch, Warm, temperatures
from torch_cudal1.judge.checks.numerics import compared, first_two
from torch_cudal1.judge.checks.profiles import TimingPlan
from torch_cudal1.judge.evaluate.decide import Unstable, score
from torch_cudal1.judge.reference.float64 import Infeasible
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure

__all__ = [
    "Audit",
    "Slots",
    "Timed",
    "facts_of",
    "stability",
    "sync_checks",
    "time_slots",
    "timing_state",
]

_HEAVY_FLOPS = 2e11  # on the CPU a float64 run of this takes seconds
_KEPT_BYTES, _MOST_KEPT = 256 << 20, 8
_AUDIT_SHARE = 0.1  # of the time budget
_SLOPE_US = 20_000.0
_SLOPES = (3, 3, 5, 7)  # of each try; batches twice as long each time
_SLOW_US = 300_000.0  # one slope of a call this long says enough
_FIRST_US, _FIRST_OVER_BASELINE, _FIRST_OVER_STEADY = 250_000.0, 20.0, 100.0
_MOST_SYNC_RATIO = 1.5  # as in CUDA-L2's defence


@dataclass(frozen=True)
class Timed:
    """A measurement with its checks, of which one may have failed, and the facts beside it (JSON)."""

    measurement: Measurement
    checks: tuple[Check, ...]
    facts: Mapping[str, Any]


@dataclass
class Audit:
    """Judges outputs of timed calls as validation did. Which call is looked at is drawn after the
    batch has ended.

    A ring entry has the parameters and buffers of the first sample and the values of one of both.
    """

    trial: Trial
    plan: TimingPlan
    judged: int = 0
    spent_s: float = 0.0
    samples: dict[int, Sample] = field(default_factory=dict)

    @property
    def sets(self) -> list[str]:
        """The input sets of the ring, by their names in the child."""
        return [sample.name for sample in first_two(self.trial)]

    @property
    def ring(self) -> tuple[int, bool]:
        """How many entries the ring has, and whether it turns."""
        return plan_ring(first_two(self.trial)[0].inputs, self._static, len(self.sets))

    @property
    def output_bytes(self) -> int:
        """Of one call."""
        outputs = first_two(self.trial)[0].reference.outputs
        return sum(out.numel() * out.element_size() for out in outputs if out is not None)

    def shift(self) -> int:
        """How far to turn the ring next."""
        return secrets.randbelow(len(self.sets)) if self.ring[1] else 0

    def wanted(self) -> bool:
        """Whether another look is due: at least one, then while the plan asks for it and it costs
        little.
        """
        return not self.judged or (
            self.judged < 4 * self.plan.outputs and self.spent_s < _AUDIT_SHARE * self.plan.budget_s
        )

    def look(self, start: int, shift: int, held: int) -> None:
        """Judge one of the `held` outputs of calls that began at ring place `start`. Raises
        CandidateFailure("timed_output").
        """
        if not held or not self.wanted():
            return
        began = time.monotonic()
        index = secrets.randbelow(held)
        place = (start + index) % self.ring[0]
        sample = self._sample((place + shift) % len(self.sets))
        for position, comparison in compared(self.trial, sample, self.trial.reread(index)):
            if not comparison.passed:
                raise CandidateFailure(
                    "timing",
                    f"a timed call answered wrongly: output {position}: {_told(comparison)}",
                    "timed_output",
                )
        self.trial.ease()
        self.judged += 1
        self.spent_s += time.monotonic() - began

    def check(self) -> Check:
        """What was looked at; to look at nothing is a failure."""
        return Check(
            "timed_output",
            self.judged > 0,
            float(self.judged),
            None,
            f"{self.judged} timed calls answered rightly",
        )

    @property
    def _static(self) -> frozenset[int]:
        return frozenset(
            index for index, role in enumerate(self.trial.subject.roles) if role != "input"
        )

    def _sample(self, content: int) -> Sample:
        if content not in self.samples:
            first, other = first_two(self.trial)[0], first_two(self.trial)[content]
            self.samples[content] = first if content == 0 else self._mixed(first, other)
        return self.samples[content]

    def _mixed(self, first: Sample, other: Sample) -> Sample:
        if not self._static:
            return other
        inputs = [
            (first if i in self._static else other).inputs[i] for i in range(len(first.inputs))
        ]
        heavy = self.trial.device.type == "cpu" and self.trial.facts.flops > _HEAVY_FLOPS
        exact = (
            (lambda inputs: Infeasible("too much work to repeat here"))
            if heavy
            else self.trial.subject.exact
        )
        return Sample(other.name, other.distribution, inputs, self.trial.subject.eager, exact)


@dataclass
class Slots:
    """Slots "baseline" and "candidate" of one child as a `Sampler`, the candidate's outputs audited
    bucket by bucket.
    """

    audit: Audit
    temperatures: tuple[L2, ...]
    persisting: str = ""  # why the L2 cache's persisting lines were not reset

    def warm(self) -> tuple[Warm, Warm]:
        """Settle both slots. Raises CandidateFailure."""
        answer = self.audit.trial.child.call(
            "warm", a="baseline", b="candidate", sets=self.audit.sets
        )
        try:
            self.persisting = str(answer["reset"])
            a, b = (Warm(*map(float, side)) for side in answer["warm"])
        except (KeyError, TypeError, ValueError) as error:
            raise _unusable(error) from error
        return a, b

    def bucket(self, batch: Batch) -> Pairs:
        """Samples of a batch; then one of its calls is judged. Raises CandidateFailure."""
        audit, shift = self.audit, self.audit.shift()
        keep = (
            max(1, min(_MOST_KEPT, _KEPT_BYTES // max(1, audit.output_bytes)))
            if audit.wanted()
            else 0
        )
        answer = audit.trial.child.call(
            "time", sets=audit.sets, shift=shift, batch=asdict(batch), keep=keep
        )
        try:
            pairs = [(float(a), float(b)) for a, b in answer["pairs"]]
            held, end = int(answer["kept"]), int(answer["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise _unusable(error) from error
        if len(pairs) != batch.pairs:
            raise CandidateFailure(
                "timing", f"{len(pairs)} pairs, expected {batch.pairs}", "protocol"
            )
        audit.look(end - held, shift, held)
        return pairs


def time_slots(trial: Trial, plan: TimingPlan) -> Timed:
    """Measure slot "candidate" against slot "baseline" of the trial's child. Raises
    CandidateFailure.
    """
    audit = Audit(trial, plan)
    slots = Slots(audit, temperatures(trial.device, plan))
    try:
        found = measure(slots, plan)
    except ValueError as error:
        raise _unusable(error) from error
    sides = trial.child.call("look")
    checks = [
        audit.check(),
        _own_clock(trial, audit, found),
        *sync_checks(sides),
        *stability(found),
    ]
    trial.child.call("drop", names=[])
    return Timed(
        found,
        tuple(checks),
        facts_of(found) | {"sides": {"baseline": sides.get("a"), "candidate": sides.get("b")}},
    )


def stability(found: Measurement) -> list[Check]:
    """`unstable`, once for each state of the cache: whether the measurement has a score at all."""
    checks = []
    for l2, summary in found.summaries.items():
        answer = score(summary, found.plan)
        if isinstance(answer, Unstable):
            checks.append(
                Check("unstable", False, answer.value, answer.limit, f"{l2} L2: {answer.reason}")
            )
        else:
            spread = max(summary.values) / min(summary.values)
            note = (
                "" if summary.steady else "; the buckets disagree, so their range is the interval"
            )
            checks.append(
                Check(
                    "unstable", True, spread, None, f"{l2} L2: largest over smallest bucket{note}"
                )
            )
    return checks


def timing_state(found: Measurement) -> Check:
    """`timing_state`: no work of later calls is done in an instance's first one, which no sample
    holds.

    What a baseline's first call takes, its ring included, says how slow this machine starts. One
    that compiles anew for each instance is refused too.
    """
    own_us, baseline_us = found.first_call_us[1], found.first_call_us[0]
    limit_us = max(
        _FIRST_US, _FIRST_OVER_BASELINE * baseline_us, _FIRST_OVER_STEADY * found.summary.b_us
    )
    return Check(
        "timing_state",
        own_us <= limit_us,
        own_us,
        limit_us,
        "microseconds of a new instance's first call",
    )


def facts_of(found: Measurement) -> dict[str, Any]:
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
        for l2, s in found.summaries.items()
    }
    first = dict(zip(("baseline", "candidate"), found.first_call_us, strict=True))
    return {
        "l2": states,
        "decided_by": found.deciding,
        "first_call_us": first,
        "rounds": found.rounds,
        "seconds": found.seconds,
    }


def _own_clock(trial: Trial, audit: Audit, found: Measurement) -> Check:
    """`wall_slope`: what the child's clock says of whole batches, against this process's clock.

    Noise passes on a later try, whose longer batches are looked at by themselves; a false clock on
    none.
    """
    cost_us = found.summaries["hot"].b_us
    spinner = ChildSpinner(trial.child, "candidate", audit.sets, keep=False)
    spinner.spin(1)  # makes the ring
    for attempt, count in enumerate(_SLOPES):
        calls = math.ceil(_SLOPE_US / cost_us) << attempt
        answer = wall_slope(
            [slope(spinner, calls) for _ in range(1 if cost_us > _SLOW_US else count)]
        )
        if answer.passed:
            break
    return answer


def sync_checks(sides: Mapping[str, Any]) -> list[Check]:
    """`sync_ratio` of the candidate; none without a device clock."""
    try:
        ratio = sides["b"]["sync_ratio"]
        if ratio is None:
            return []
        return [
            Check(
                "sync_ratio",
                float(ratio) <= _MOST_SYNC_RATIO,
                float(ratio),
                _MOST_SYNC_RATIO,
                "all streams joined, over its own",
            )
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _unusable(error) from error


def _told(comparison: Any) -> str:
    return comparison.detail or f"error ratio {comparison.ratio} over {comparison.limit}"


def _unusable(error: Exception) -> CandidateFailure:
    return CandidateFailure("timing", f"unusable samples: {error}", "protocol")
