"""A heat: which of several kernels for one region is fastest, asked in one process before any of
them is judged.

A judgement costs seconds, a heat tenths of them. Times stand beside eager's in the same process;
whose result is grossly not eager's is out. Beside them stands about what Inductor would take
(`ir.fusion_estimate`), where it may run. Nothing of this is evidence: what comes out ahead must
still pass the judge, which times it again.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch_cudal1.core import telemetry
from torch_cudal1.device.gpu_lock import lock_gpu
from torch_cudal1.device.gpu_memory import release_cached_memory
from torch_cudal1.ir.fusion_estimate import approximate_fused_epilogue
from torch_cudal1.ir.records import Candidate, Region
from torch_cudal1.ir.schedule import EAGER
from torch_cudal1.judge.evaluate.evaluator import EvaluationConfig
from torch_cudal1.judge.reference.compare import is_grossly_equal
from torch_cudal1.judge.reference.region_reference import Outputs, RegionReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits
from torch_cudal1.judge.sandbox.worker_pool import acquire

__all__ = ["PrescreenResult", "prescreen"]

_BUDGET_S = 1.5
_EAGER, _ONE_PASS = "eager", "one pass"
_SAMPLE = 1 << 20  # elements
_LEEWAY = 1.1  # it is no more than a guess, and others may be at work on the GPU


@dataclass(frozen=True)
class PrescreenResult:
    """Medians in microseconds per call, eager's and those of the candidates by position, and why
    others have none.

    `apart`: how far a candidate's results are from eager's, root mean square over root mean square.
    `one_pass_us`: of the product with one pass for all that follows; None where that was not asked.
    """

    eager_us: float
    medians_us: Mapping[int, float]
    failures: Mapping[int, str]
    apart: Mapping[int, float] = field(default_factory=dict)
    one_pass_us: float | None = None

    @property
    def to_beat_us(self) -> float:
        """What a kernel must be faster than to be worth a place in a model."""
        return (
            self.eager_us
            if self.one_pass_us is None
            else min(self.eager_us, _LEEWAY * self.one_pass_us)
        )


def prescreen(
    region: Region, candidates: Sequence[Candidate], job: EvaluationConfig
) -> PrescreenResult:
    """Time `candidates` of `region` and eager in turn, on the user's own inputs if there are any.
    Raises SandboxError.

    A candidate that ends the process is out, and the others run again; where eager itself cannot
    run, all have failed.
    """
    failures: dict[int, str] = {}
    apart: dict[int, float] = {}
    medians: dict[str, float] = {}
    while len(failures) < len(candidates) and not medians:
        medians = _run(region, candidates, job, failures, apart)
    by_position = {at: medians[str(at)] for at in range(len(candidates)) if str(at) in medians}
    found = PrescreenResult(
        medians.get(_EAGER, 0.0), by_position, failures, apart, medians.get(_ONE_PASS)
    )
    facts: dict[str, object] = {"eager_us": found.eager_us, "one_pass_us": found.one_pass_us}
    facts |= {"medians_us": list(by_position.items()), "failures": list(failures.items())}
    telemetry.record("judge", "prescreen", region.key[:12], **facts)
    return found


def _run(
    region: Region,
    candidates: Sequence[Candidate],
    job: EvaluationConfig,
    failures: dict[int, str],
    apart: dict[int, float],
) -> dict[str, float]:
    """One process: medians by slot; {} when a candidate, now among the failures, ended it."""
    own = replace(job, reference_cache={})
    subject = RegionReference(region, own.contract, own.device)
    eager = Candidate(region.program, EAGER, "baseline")
    with acquire(make_limits(own.settings, own.device), own.contract) as child:
        trial = Trial(
            subject, eager, own.contract, own.device, child, own.examples, profile=own.profile
        )
        try:
            kinds = ("normal", "shifted") if own.examples is None else ("examples",)
            sets = [trial.draw(kind).name for kind in kinds]
            expected = _outputs(trial, _EAGER, eager, sets[0])
        except CandidateFailure as error:
            failures.update(
                dict.fromkeys(range(len(candidates)), f"eager cannot run: {error.found}")
            )
            return {}
        ready, outputs = [], None
        for at in range(len(candidates)):
            outputs = (
                None
                if at in failures
                else _fit(trial, at, candidates[at], sets[0], expected, failures)
            )
            if outputs is not None:
                ready.append(at)
                apart[at] = _apart(outputs, expected)
        asked = "compile" not in own.settings.without and _runs_in_one_pass(trial, eager, sets[0])
        beside = (_EAGER, _ONE_PASS) if asked else (_EAGER,)
        if not child.usable:
            return {}
        del outputs, expected
        release_cached_memory(own.device)
        with lock_gpu(own.device, "prescreen"):
            return _timed(child, beside, ready, sets, failures)


def _runs_in_one_pass(trial: Trial, eager: Candidate, inputs: str) -> bool:
    """Whether what Inductor would take can be told; nothing of it is compared, for it computes less
    than eager.
    """
    program = approximate_fused_epilogue(eager.program)
    if program is None or not trial.child.usable:
        return False
    try:
        _outputs(trial, _ONE_PASS, Candidate(program, EAGER, "baseline"), inputs)
    except CandidateFailure:
        return False
    return True


def _fit(
    trial: Trial,
    at: int,
    candidate: Candidate,
    inputs: str,
    expected: Outputs,
    failures: dict[int, str],
) -> Outputs | None:
    """What a candidate yields, if it loads, runs and yields about what eager does."""
    if not trial.child.usable:
        return None
    try:
        found = _outputs(trial, str(at), candidate, inputs)
    except CandidateFailure as error:
        failures[at] = error.found
        return None
    if all(is_grossly_equal(one, other) for one, other in zip(found, expected, strict=True)):
        return found
    failures[at] = "its result is not eager's"
    return None


def _apart(outputs: Outputs, expected: Outputs) -> float:
    """The largest distance of an output from eager's, told from its first elements."""
    found = [0.0]
    for one, other in zip(outputs, expected, strict=True):
        if one is not None and other is not None and other.is_floating_point():
            a, b = (tensor.reshape(-1)[:_SAMPLE].double() for tensor in (one, other))
            both = a.isfinite() & b.isfinite()
            scale = b[both].norm().item()
            found.append((a - b)[both].norm().item() / scale if scale > 0 else 0.0)
    return max(found)


def _outputs(trial: Trial, slot: str, candidate: Candidate, inputs: str) -> Outputs:
    trial.load(slot, candidate)
    return trial.call_slot(slot, inputs).outputs


def _timed(
    child: Child,
    beside: Sequence[str],
    ready: Sequence[int],
    sets: Sequence[str],
    failures: dict[int, str],
) -> dict[str, float]:
    slots = [*beside, *map(str, ready)]
    try:
        answer = child.call("bench", slots=slots, sets=list(sets), budget_s=_BUDGET_S)
    except CandidateFailure as error:
        failures.update(
            dict.fromkeys(ready[-1:], f"the heat ended: {error.found}")
        )  # the others run again
        return {}
    return {
        slot: statistics.median(float(value) for value in answer["samples"][slot]) for slot in slots
    }
