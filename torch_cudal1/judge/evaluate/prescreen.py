"""Prescreens kernels for one region: times several in one process before any of them is evaluated.

An evaluation costs seconds, a prescreen tenths of them. Kernels are compared with eager in the same
process; a kernel whose result is grossly not eager's is excluded. An estimate of what Inductor would
take (`ir.fusion_estimate`) is timed with them, where Inductor may run. None of this is evidence: the
fastest must still pass the evaluation, which times it again.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch_cudal1.core import telemetry
from torch_cudal1.device.gpu_lock import lock_gpu
from torch_cudal1.device.gpu_memory import release_cached_memory
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.fusion_estimate import approximate_fused_epilogue
from torch_cudal1.ir.program import Program
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
# Eager takes a pass for each element-wise step, Inductor one for all: four groups of VGG that beat
# eager made the model 0.79 times as fast as Inductor's.
_EAGER, _ONE_PASS = "eager", "one pass"
# A prescreen takes tenths of seconds: float64 copies of a whole output would take 8 bytes an
# element of memory that timed calls may need.
_COMPARED_ELEMENTS = 1 << 20
# the estimate is rough, and other processes may use the GPU
_ONE_PASS_LEEWAY = 1.1


@dataclass(frozen=True)
class PrescreenResult:
    """Medians in microseconds per call, eager's and those of the candidates by position, and why
    others have none.

    `errors`: how far a candidate's results are from eager's, root mean square over root mean
    square. `one_pass_us`: of the product with one pass for all that follows; None where it was not
    measured.
    """

    eager_us: float
    medians_us: Mapping[int, float]
    failures: Mapping[int, str]
    errors: Mapping[int, float] = field(default_factory=dict)
    one_pass_us: float | None = None

    @property
    def to_beat_us(self) -> float:
        """The time that a kernel must stay below to be worth a place in a model."""
        return (
            self.eager_us
            if self.one_pass_us is None
            else min(self.eager_us, _ONE_PASS_LEEWAY * self.one_pass_us)
        )


def prescreen(
    region: Region,
    candidates: Sequence[Candidate],
    config: EvaluationConfig,
    eager_program: Program | None = None,
) -> PrescreenResult:
    """Time `candidates` of `region` and eager in turn, on the user's own inputs if there are any.
    `eager_program`: the region's with faster operators of PyTorch's, where there are any. Raises
    SandboxError.

    A candidate that ends the process is out, and the others run again; where eager itself cannot
    run, all have failed.
    """
    eager = Candidate(eager_program or region.program, EAGER, "baseline")
    failures: dict[int, str] = {}
    errors: dict[int, float] = {}
    medians: dict[str, float] = {}
    # A candidate that ended the child is among the failures by then: the others run again in a new
    # child.
    while len(failures) < len(candidates) and not medians:
        medians = _prescreen_once(region, candidates, config, eager, failures, errors)
    by_position = {at: medians[str(at)] for at in range(len(candidates)) if str(at) in medians}
    result = PrescreenResult(
        medians.get(_EAGER, 0.0), by_position, failures, errors, medians.get(_ONE_PASS)
    )
    facts: dict[str, object] = {"eager_us": result.eager_us, "one_pass_us": result.one_pass_us}
    facts |= {"medians_us": list(by_position.items()), "failures": list(failures.items())}
    telemetry.record("judge", "heat", region.key[:12], **facts)
    return result


def _prescreen_once(
    region: Region,
    candidates: Sequence[Candidate],
    config: EvaluationConfig,
    eager: Candidate,
    failures: dict[int, str],
    errors: dict[int, float],
) -> dict[str, float]:
    """One process: medians by slot; {} when a candidate, now among the failures, ended it."""
    config = replace(config, reference_cache={})
    subject = RegionReference(region, config.contract, config.device)
    with acquire(make_limits(config.settings, config.device), config.contract) as child:
        trial = Trial(
            subject,
            eager,
            config.contract,
            config.device,
            child,
            config.examples,
            profile=config.profile,
        )
        try:
            # Two sets, so that successive timed calls have different values.
            kinds = ("normal", "shifted") if config.examples is None else ("examples",)
            sets = [trial.draw(kind).name for kind in kinds]
            expected = _run_slot(trial, _EAGER, eager, sets[0])
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
                else _run_candidate(trial, at, candidates[at], sets[0], expected, failures)
            )
            if outputs is not None:
                ready.append(at)
                errors[at] = _relative_error(outputs, expected)
        # `without` holds "compile" where the user switched Inductor off: then it is no rival.
        has_one_pass = "compile" not in config.settings.without and _runs_in_one_pass(
            trial, eager, sets[0]
        )
        references = (_EAGER, _ONE_PASS) if has_one_pass else (_EAGER,)
        # With the child all slots are lost, also those of kernels that work.
        if not child.usable:
            return {}
        # Each process has a caching allocator of its own: memory that this one caches is missing in
        # the child.
        del outputs, expected
        release_cached_memory(config.device)
        # Work of other processes on this GPU would be in the samples.
        with lock_gpu(config.device, "shortlist"):
            verb = "chains" if _runs_in_graph(region, config) else "bench"
            return _time_slots(child, verb, references, ready, sets, failures)


def _runs_in_graph(region: Region, config: EvaluationConfig) -> bool:
    """Whether the kernels will run in a CUDA graph as a rule, so that what their launches cost is
    none of their time.
    """
    is_allowed = config.device.type == "cuda" and "graphs" not in config.settings.without
    return is_allowed and not is_random_program(region.program)


def _runs_in_one_pass(trial: Trial, eager: Candidate, inputs: str) -> bool:
    """Whether what Inductor would take can be told; nothing of it is compared, for it computes less
    than eager.
    """
    program = approximate_fused_epilogue(eager.program)
    if program is None or not trial.child.usable:
        return False
    try:
        _run_slot(trial, _ONE_PASS, Candidate(program, EAGER, "baseline"), inputs)
    except CandidateFailure:
        return False
    return True


def _run_candidate(
    trial: Trial,
    at: int,
    candidate: Candidate,
    inputs: str,
    expected: Outputs,
    failures: dict[int, str],
) -> Outputs | None:
    """The outputs of a candidate, None if it does not load, does not run, or its result is grossly
    not eager's.
    """
    if not trial.child.usable:
        return None
    try:
        outputs = _run_slot(trial, str(at), candidate, inputs)
    except CandidateFailure as error:
        failures[at] = error.found
        return None
    # Only gross differences exclude here; the evaluation compares with float64.
    if all(is_grossly_equal(a, b) for a, b in zip(outputs, expected, strict=True)):
        return outputs
    failures[at] = "its result is not eager's"
    return None


def _relative_error(outputs: Outputs, expected: Outputs) -> float:
    """The largest relative distance (rms over rms) of an output from eager's, over its first
    elements.
    """
    errors = [0.0]
    for output, reference in zip(outputs, expected, strict=True):
        if output is not None and reference is not None and reference.is_floating_point():
            a, b = (
                tensor.reshape(-1)[:_COMPARED_ELEMENTS].double() for tensor in (output, reference)
            )
            # Where either has NaN or infinity a difference is no distance.
            both = a.isfinite() & b.isfinite()
            scale = b[both].norm().item()
            errors.append((a - b)[both].norm().item() / scale if scale > 0 else 0.0)
    return max(errors)


def _run_slot(trial: Trial, slot: str, candidate: Candidate, inputs: str) -> Outputs:
    trial.load(slot, candidate)
    return trial.call_slot(slot, inputs).outputs


def _time_slots(
    child: Child,
    verb: str,
    references: Sequence[str],
    ready: Sequence[int],
    sets: Sequence[str],
    failures: dict[int, str],
) -> dict[str, float]:
    slots = [*references, *map(str, ready)]
    try:
        answer = child.call(verb, slots=slots, sets=list(sets), budget_s=_BUDGET_S)
        if reason := answer.get("uncaptured"):
            telemetry.record("judge", "uncaptured", slots=slots, reason=reason)
    except CandidateFailure as error:
        # the others run again
        # The slot loaded last has proven least.
        failures.update(dict.fromkeys(ready[-1:], f"the prescreen ended: {error.found}"))
        return {}
    return {
        slot: statistics.median(float(value) for value in answer["samples"][slot]) for slot in slots
    }
