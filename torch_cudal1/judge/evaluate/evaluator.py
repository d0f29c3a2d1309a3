"""Evaluates a candidate for a region: is it right, and is it faster than the best baseline.

One child process per candidate. Everything a candidate does wrong comes back as a `Rejected` value;
SandboxError means that no candidate can be evaluated on this machine. `baseline_benchmark` finds
the fastest baseline; candidates that are sources are the business of `source_evaluator`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import ProgramError, SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.gpu_lock import lock_gpu
from torch_cudal1.device.gpu_state import read_gpu_state
from torch_cudal1.device.peaks import check_roofline, count_required_work, find_device_peaks
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import (
    Accepted,
    Candidate,
    CheckResult,
    Contract,
    Decision,
    Region,
    Rejected,
    Target,
    Timing,
    Verdict,
)
from torch_cudal1.ir.schedule import EAGER, Schedule
from torch_cudal1.ir.value_specs import output_specs
from torch_cudal1.judge.benchmark.candidate_timing import BenchmarkResult, time_program
from torch_cudal1.judge.benchmark.quoted_speedup import (
    Unstable,
    round_towards_one,
    score_measurement,
)
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS, TimingPlan
from torch_cudal1.judge.checks.static.contract import contract
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.evaluate.confirm import confirm_measurement, find_other_device
from torch_cudal1.judge.evaluate.decide import decide
from torch_cudal1.judge.profiles import Profile, profile_for
from torch_cudal1.judge.reference.input_set import ReferenceCache
from torch_cudal1.judge.reference.region_reference import RegionReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits
from torch_cudal1.judge.sandbox.confinement_level import Confinement
from torch_cudal1.judge.sandbox.limits import Trust
from torch_cudal1.judge.sandbox.worker_pool import acquire, prestart, spawn
from torch_cudal1.judge.sandbox.worker_pool import expect as expect_children
from torch_cudal1.judge.wire.transport import read_program, write_payloads

if TYPE_CHECKING:
    from torch_cudal1.kernels import Proposal

__all__ = [
    "BaselineRanking",
    "Evaluation",
    "EvaluationConfig",
    "build_candidates",
    "evaluate_candidate",
    "make_evidence",
    "prestart_fork_server",
    "prestart_worker",
    "summarise_evaluation",
    "validate_candidate",
]

# Tensors reach a process through GPU memory that is shared with it for as long as it lives: at most
# this much, and at most a twelfth of what is free. For larger ones more is shared while they move.
_SLACK_BYTES, _MAX_SHARED_BYTES, _FREE_MEMORY_DIVISOR = 1 << 20, 1 << 30, 12


@dataclass(frozen=True)
class EvaluationConfig:
    """How candidates for a region are evaluated. `examples`: real inputs in the order of the
    region's, parameters included.

    `reference_cache` remembers the secret input sets and what eager and float64 yield on them, for all
    candidates evaluated with this config. `trust`: "foreign" for a Program without a trusted author: it
    runs confined as foreign source does, in a process of its own.
    """

    settings: Settings
    contract: Contract
    device: torch.device
    examples: tuple[torch.Tensor, ...] | None = None
    plan: TimingPlan = TIMING_PLANS["fast"]
    # of this task so far: a score above twice that is measured again
    best_score: float | None = None
    # Not compared: `==` of dictionaries of tensors raises, as a comparison of tensors has no truth
    # value.
    reference_cache: ReferenceCache = field(default_factory=dict, compare=False, repr=False)
    trust: Trust = "own"

    @property
    def profile(self) -> Profile:
        """How much is tested goes with how long is measured."""
        return profile_for(self.plan.profile)


@dataclass(frozen=True)
class BaselineRanking:
    """Result of the baseline benchmark: the fastest, medians in microseconds per call, why others
    did not run, and the seconds until each had answered once, which is what a compiler takes for
    the region.
    """

    best: Candidate
    medians_us: Mapping[str, float]
    failures: Mapping[str, str] = field(default_factory=dict)
    ready_s: Mapping[str, float] = field(default_factory=dict)

    def estimate_compile_s(self, schedule: Schedule) -> float:
        """What compiling under a schedule took here, 0.0 where that is not known. A graph of it is
        compiled the same way.
        """
        # A CUDA graph of a schedule is compiled as its base is.
        return self.ready_s.get(schedule.base, 0.0)


@dataclass(frozen=True)
class Evaluation:
    """The decision on one candidate with its evidence. `confinement`: of its process, None if none
    was started.
    """

    candidate: Candidate
    decision: Decision
    verdict: Verdict
    confinement: Confinement | None = None

    @property
    def timing(self) -> Timing | None:
        """The measurement, None if it was never reached."""
        return self.decision.timing


def prestart_worker(region: Region, config: EvaluationConfig) -> None:
    """Start a child for later evaluations of `region` in the background, as early as possible inside
    `pool_scope()`.
    """
    inputs = sum(spec.size_bytes for spec in region.program.inputs)
    outputs = sum(spec.size_bytes for spec in output_specs(region.program) if spec is not None)
    # The share is a part of what is free now: other processes allocate on the GPU too.
    free = torch.cuda.mem_get_info(config.device)[0] if config.device.type == "cuda" else 0
    shared = max(inputs, outputs) + _SLACK_BYTES
    # less than a message is of no use
    fits = shared <= min(_MAX_SHARED_BYTES, free // _FREE_MEMORY_DIVISOR)
    prestart(make_limits(config.settings, config.device), config.contract, shared if fits else 0)


def prestart_fork_server(settings: Settings, device: torch.device) -> None:
    """Start the fork server before the region is known, while a call is captured."""
    expect_children(make_limits(settings, device))


def evaluate_candidate(
    region: Region, candidate: Candidate, ranking: BaselineRanking, config: EvaluationConfig
) -> Evaluation:
    """Validate a candidate, time it against the best baseline if it is right, and decide. Raises
    SandboxError.
    """
    timing: Timing | None = None
    # Static checks come first, in this process: a Program that they refuse is never run.
    checks = contract(region, candidate)
    verdict = Verdict(tuple(checks))
    decision: Decision | None = None
    confinement: Confinement | None = None
    if verdict.passed:
        with _acquire_child(config) as child:
            confinement = child.confinement
            trial = _make_trial(region, candidate, config, child)
            verdict = _validate(trial, checks)
            # Kernels of a refused Program may have written to any memory of the child's CUDA
            # context, so the next candidate must not run there. ATen steps alone cannot.
            child.usable = child.usable and (verdict.passed or not candidate.program.launches)
            if verdict.passed:
                try:
                    verdict, timing = _measure(trial, ranking, verdict, config)
                except CandidateFailure as error:
                    # A call that failed may have left a sticky CUDA error, after which no call in
                    # that context works.
                    child.usable = False
                    decision = Rejected(f"{error.stage}: {error.found}", error.detector)
    decision = decision or decide(verdict, timing, config.settings)
    telemetry.count("candidates_judged")
    evaluation = Evaluation(candidate, decision, verdict, confinement)
    telemetry.record(
        "judge",
        "accepted" if isinstance(decision, Accepted) else "rejected",
        region.key[:12],
        **summarise_evaluation(evaluation),
    )
    return evaluation


def validate_candidate(region: Region, candidate: Candidate, config: EvaluationConfig) -> Verdict:
    """Validate a candidate without timing it: for a part whose speed only the whole can tell.
    Raises SandboxError.
    """
    checks = contract(region, candidate)
    verdict = Verdict(tuple(checks))
    if verdict.passed:
        with _acquire_child(config) as child:
            verdict = _validate(
                _make_trial(region, candidate, replace(config, examples=None), child), checks
            )
            child.usable = child.usable and (verdict.passed or not candidate.program.launches)
    telemetry.count("candidates_judged")
    return verdict


def build_candidates(
    region: Region, proposals: Sequence[Proposal], config: EvaluationConfig, target: Target
) -> tuple[Candidate | Rejected, ...]:
    """Compile kernel proposals for a region in a child that sees no GPU; one answer per proposal,
    in order. Raises SandboxError.
    """
    answers: list[Candidate | Rejected] = []
    pending = list(proposals)
    # A proposal that ends the child costs only itself: the others are built in a new child.
    while pending:
        # Building needs no GPU: Triton gets the target explicitly. A compiler that hangs holds
        # none.
        limits = make_limits(config.settings, torch.device("cpu"), visible_gpu=False)
        with spawn(limits, config.contract) as child:
            payloads = write_payloads(region.program, child.reserve_file())
            while pending and child.usable:
                answers.append(
                    _build_candidate(child, region.program, payloads, pending.pop(0), target)
                )
    for answer in answers:
        telemetry.count("candidates_built" if isinstance(answer, Candidate) else "builds_failed")
    return tuple(answers)


def make_evidence(evaluation: Evaluation, ranking: BaselineRanking) -> dict[str, Any]:
    """The evidence of a choice as JSON: timing, checks, profile, how its process was confined."""
    return {
        "timing": _encode_timing(evaluation.timing, ranking),
        "checks": [_check_json(check) for check in evaluation.verdict.checks],
        "profile": evaluation.verdict.profile,
        "sandbox": evaluation.confinement.to_json() if evaluation.confinement else None,
    }


def summarise_evaluation(evaluation: Evaluation) -> dict[str, Any]:
    """One line of "what was tried" as JSON."""
    candidate, decision, timing = evaluation.candidate, evaluation.decision, evaluation.timing
    rejected = decision if isinstance(decision, Rejected) else None
    return {
        "label": candidate.label,
        "techniques": list(candidate.techniques),
        "origin": candidate.origin,
        "schedule": candidate.schedule,
        "decision": "rejected" if rejected else "accepted",
        "reason": rejected.reason if rejected else "",
        "detector": rejected.detector if rejected else "",
        "numbers": {name: _drop_infinity(value) for name, value in rejected.numbers.items()}
        if rejected
        else {},
        "speedup": timing.speedup if timing else None,
        "low": timing.low if timing else None,
        "high": timing.high if timing else None,
        "candidate_us": timing.candidate_us if timing else None,
        "error_ratio": _drop_infinity(evaluation.verdict.worst_error_ratio),
    }


def _acquire_child(config: EvaluationConfig) -> AbstractContextManager[Child]:
    """A child for one candidate: one that was started before if the code is this package's, a new
    one for a stranger's.
    """
    limits = make_limits(config.settings, config.device, trust=config.trust)
    # A process that has run a stranger's code is never used again. One that has run only this
    # package's Programs is cleared and serves the next candidate.
    return (
        acquire(limits, config.contract)
        if config.trust == "own"
        else Child(limits, config.contract)
    )


def _make_trial(
    region: Region, candidate: Candidate, config: EvaluationConfig, child: Child
) -> Trial:
    subject = RegionReference(
        region, config.contract, config.device, proven=config.examples is not None
    )
    return Trial(
        subject,
        candidate,
        config.contract,
        config.device,
        child,
        config.examples,
        reference_cache=config.reference_cache,
        profile=config.profile,
    )


def _validate(trial: Trial, checked: Sequence[CheckResult]) -> Verdict:
    """`checked`: what passed before the child was started."""
    try:
        trial.load("candidate", trial.candidate)
    except CandidateFailure as error:
        return Verdict(
            (*checked, CheckResult(error.detector, False, detail=f"{error.stage}: {error.found}"))
        )
    return Verdict((*checked, *validate(trial).checks))


def _measure(
    trial: Trial, ranking: BaselineRanking, verdict: Verdict, config: EvaluationConfig
) -> tuple[Verdict, Timing | None]:
    """Time the candidate, again in a fresh process where its score is surprising. Returns the
    verdict with the checks of timing, and the measurement if all of them passed.
    """
    elsewhere = find_other_device(config.device)
    where = "the same device" if elsewhere is None else "another device"
    # The cached results are tensors of the first device.
    config_again = (
        config if elsewhere is None else replace(config, device=elsewhere, reference_cache={})
    )
    assert isinstance(trial.candidate, Candidate)
    assert isinstance(trial.reference, RegionReference)
    region, candidate = trial.reference.region, trial.candidate
    # Clocks, power and temperature on both sides of the measurement: throttling shows in the
    # evidence.
    gpu: dict[str, Any] = {"before": read_gpu_state(config.device)}
    first = _time_against_baseline(trial, ranking, config, gpu)
    confirmed = confirm_measurement(
        first,
        lambda: _time_in_new_process(region, candidate, ranking, config_again),
        config.best_score,
        where,
    )
    gpu["after"] = read_gpu_state(config.device)
    verdict = replace(verdict, checks=(*verdict.checks, *confirmed.checks))
    summary, quoted = (
        confirmed.measurement.summary,
        score_measurement(confirmed.measurement.summary, config.plan),
    )
    details = {**confirmed.facts, "gpu": gpu}
    telemetry.record("judge", "timed", trial.reference.key[:12], label=candidate.label, **details)
    # A `Timing` cannot be built without a passed verdict.
    if isinstance(quoted, Unstable) or not verdict.passed:
        return verdict, None
    timing = Timing(
        verdict=verdict,
        baseline=ranking.best.label,
        candidate_us=summary.b_us,
        baseline_us=summary.a_us,
        speedup=summary.speedup,
        low=summary.low,
        high=summary.high,
        pairs=summary.pairs,
        baselines_us=dict(ranking.medians_us),
        profile=config.plan.profile,
        score=quoted,
        details=details,
    )
    return verdict, timing


def _time_against_baseline(
    trial: Trial, ranking: BaselineRanking, config: EvaluationConfig, gpu: dict[str, Any]
) -> BenchmarkResult:
    """The candidate against the best baseline in the trial's child; whether others timed there
    meanwhile goes into `gpu`.

    Raises CandidateFailure.
    """
    # Before the lock is taken: other processes would wait for it while Inductor compiles.
    try:
        trial.load("baseline", ranking.best)
    except CandidateFailure as error:
        raise CandidateFailure(
            "timing", f"the baseline could not be loaded beside it: {error.found}", "timing"
        ) from error
    # Other timings on this GPU would be in these samples. Where no lock can be had the reason is
    # kept as evidence.
    with lock_gpu(config.device, "timing") as refusal:
        gpu["shared"] = str(refusal or "")
        result = time_program(trial, replace(config.plan, margin=config.settings.margin))
    trial.drop_large_sets()
    # The bound must hold in the fastest state of the cache too.
    fastest_us = min(summary.b_us for summary in result.measurement.summaries.values())
    assert isinstance(trial.candidate, Candidate)
    return replace(
        result,
        checks=(
            *result.checks,
            check_roofline(
                count_required_work(trial.candidate.program),
                find_device_peaks(config.device),
                fastest_us,
            ),
        ),
    )


def _time_in_new_process(
    region: Region, candidate: Candidate, ranking: BaselineRanking, config: EvaluationConfig
) -> BenchmarkResult:
    """The same in a process that has run nothing else. Raises CandidateFailure."""
    with spawn(
        make_limits(config.settings, config.device, trust=config.trust), config.contract
    ) as child:
        trial = _make_trial(region, candidate, config, child)
        # The first two sets of a trial are those that timed calls rotate.
        for distribution in ("normal", "shifted"):
            trial.draw(distribution)
        trial.load("candidate", candidate)
        return _time_against_baseline(trial, ranking, config, {})


def _build_candidate(
    child: Child, program: Program, payloads: list[Any], proposal: Proposal, target: Target
) -> Candidate | Rejected:
    path = child.reserve_file()
    sm = int(target.arch.removeprefix("sm_")) if target.arch.startswith("sm_") else 0
    try:
        answer = child.call(
            "build",
            program=program.to_json(),
            payloads=payloads,
            proposal=proposal.to_json(),
            sm=sm,
            path=str(path),
        )
        # The answer comes from a process that ran compilers on the proposal, so it is parsed as any
        # untrusted Program. Its machine code is read from the path made here: an answer cannot name
        # another file.
        built = read_program(answer["program"], [*answer["payloads"][:2], str(path)])
    except CandidateFailure as error:
        return Rejected(error.found, error.detector)
    except (ProgramError, SandboxError, KeyError, TypeError, ValueError) as error:
        return Rejected(f"the build yielded no Program: {error}", "contract")
    finally:
        Path(path).unlink(missing_ok=True)
    return Candidate(built, EAGER, "kernels", (proposal.family,))


def _encode_timing(timing: Timing | None, ranking: BaselineRanking) -> dict[str, Any] | None:
    if timing is None:
        return None
    return {
        "baseline": timing.baseline,
        "candidate_us": timing.candidate_us,
        "baseline_us": timing.baseline_us,
        "speedup": timing.speedup,
        "low": timing.low,
        "high": timing.high,
        "profile": timing.profile,
        "score": round_towards_one(timing.low) if timing.score is None else timing.score,
        "pairs": timing.pairs,
        "baselines_us": dict(ranking.medians_us),
        "details": dict(timing.details),
    }


def _check_json(check: CheckResult) -> dict[str, Any]:
    return {
        "name": check.name,
        "passed": check.passed,
        "value": _drop_infinity(check.value),
        "limit": _drop_infinity(check.limit),
        "detail": check.detail,
    }


def _drop_infinity(value: float | None) -> float | None:
    # JSON has neither NaN nor infinity.
    return value if value is not None and math.isfinite(value) else None
