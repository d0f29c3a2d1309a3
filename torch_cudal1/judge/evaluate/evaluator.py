"""The judge's front door: is a candidate right and faster. One child process per question; `race`
finds the fastest baseline.

Everything a candidate does wrong comes back as a `Rejected` value; SandboxError means that this
machine cannot judge at all.
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
from torch_cudal1.device.gpu_lock import exclusive
from torch_cudal1.device.gpu_state import gpu_state
from torch_cudal1.device.peaks import ceiling, roofline, work
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import (
    Accepted,
    Candidate,
    Check,
    Contract,
    Decision,
    Region,
    Rejected,
    Schedule,
    Target,
    Timing,
    Verdict,
)
from torch_cudal1.ir.value_specs import output_specs
from torch_cudal1.judge.benchmark.candidate_timing import Timed, time_slots
from torch_cudal1.judge.checks.profiles import TIMING_PLANS, Profile, TimingPlan, profile_for
from torch_cudal1.judge.checks.static.contract import contract
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.evaluate.confirm import confirm, other_device
from torch_cudal1.judge.evaluate.decide import Unstable, conservative, decide, score
from torch_cudal1.judge.reference.input_set import Book
from torch_cudal1.judge.reference.region_reference import RegionSubject
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, limits_for
from torch_cudal1.judge.sandbox.confinement_level import Confinement
from torch_cudal1.judge.sandbox.limits import Trust
from torch_cudal1.judge.sandbox.worker_pool import begin as begin_child
from torch_cudal1.judge.sandbox.worker_pool import expect as expect_children
from torch_cudal1.judge.sandbox.worker_pool import fresh, lent
from torch_cudal1.judge.wire.transport import read_program, write_payloads

if TYPE_CHECKING:
    from torch_cudal1.kernels import Proposal

__all__ = [
    "Job",
    "Judgement",
    "Ranking",
    "begin",
    "build",
    "check",
    "evidence",
    "expect",
    "judge",
    "tried",
]

# of the GPU with each process, for as long as it lives; for larger tensors more is shared while
# they are handed over
_SLACK_BYTES, _MOST_SHARED_BYTES, _SHARE_OF_FREE = 1 << 20, 1 << 30, 12


@dataclass(frozen=True)
class Job:
    """Under what a region is judged. `examples`: real inputs in the order of the region's,
    parameters included.

    `book` remembers the secret input sets and what eager and float64 yield on them, for all
    candidates judged under this job. `trust`: "foreign" for a Program that nobody vouches for: it
    runs confined as a stranger's source does, in a process of its own.
    """

    settings: Settings
    contract: Contract
    device: torch.device
    examples: tuple[torch.Tensor, ...] | None = None
    plan: TimingPlan = TIMING_PLANS["fast"]
    best_score: float | None = (
        None  # of this task so far: a score above twice that is measured again
    )
    book: Book = field(default_factory=dict, compare=False, repr=False)
    trust: Trust = "own"

    @property
    def profile(self) -> Profile:
        """How much is tested goes with how long is measured."""
        return profile_for(self.plan.profile)


@dataclass(frozen=True)
class Ranking:
    """The race of the baselines: the winner, medians in microseconds per call, why others did not
    run, and the seconds until each had answered once, which is what a compiler takes for the
    region.
    """

    best: Candidate
    medians_us: Mapping[str, float]
    failures: Mapping[str, str] = field(default_factory=dict)
    ready_s: Mapping[str, float] = field(default_factory=dict)

    def compiling_s(self, schedule: Schedule) -> float:
        """What compiling under a schedule took here, 0.0 where that is not known. A graph of it is
        compiled the same way.
        """
        return self.ready_s.get(schedule.partition("+")[0], 0.0)


@dataclass(frozen=True)
class Judgement:
    """One candidate's fate with all its evidence. `confinement`: of its process, None if none was
    started.
    """

    candidate: Candidate
    decision: Decision
    verdict: Verdict
    confinement: Confinement | None = None

    @property
    def timing(self) -> Timing | None:
        """The measurement, None if it was never reached."""
        return self.decision.timing


def begin(region: Region, job: Job) -> None:
    """Start a process for later questions about `region` in the background. For inside
    `kept_warm()`, as early as can be.
    """
    inputs = sum(spec.size_bytes for spec in region.program.inputs)
    outputs = sum(spec.size_bytes for spec in output_specs(region.program) if spec is not None)
    free = torch.cuda.mem_get_info(job.device)[0] if job.device.type == "cuda" else 0
    shared = max(inputs, outputs) + _SLACK_BYTES
    fits = shared <= min(
        _MOST_SHARED_BYTES, free // _SHARE_OF_FREE
    )  # less than a message is of no use
    begin_child(limits_for(job.settings, job.device), job.contract, shared if fits else 0)


def expect(settings: Settings, device: torch.device) -> None:
    """Prepare for `begin` before the region is known: for inside `kept_warm()`, while a call is
    captured.
    """
    expect_children(limits_for(settings, device))


def judge(region: Region, candidate: Candidate, ranking: Ranking, job: Job) -> Judgement:
    """Validate a candidate, time it against the best baseline if it is right, and decide. Raises
    SandboxError.
    """
    timing: Timing | None = None
    checks = contract(region, candidate)
    verdict = Verdict(tuple(checks))
    decision: Decision | None = None
    confinement: Confinement | None = None
    if verdict.passed:
        with _child(job) as child:
            confinement = child.confinement
            trial = _trial(region, candidate, job, child)
            verdict = _validated(trial, checks)
            child.usable = child.usable and (verdict.passed or not candidate.program.launches)
            if verdict.passed:
                try:
                    verdict, timing = _measured(trial, ranking, verdict, job)
                except CandidateFailure as error:
                    child.usable = False
                    decision = Rejected(f"{error.stage}: {error.found}", error.detector)
    decision = decision or decide(verdict, timing, job.settings)
    telemetry.count("candidates_judged")
    judgement = Judgement(candidate, decision, verdict, confinement)
    telemetry.record(
        "judge",
        "accepted" if isinstance(decision, Accepted) else "rejected",
        region.key[:12],
        **tried(judgement),
    )
    return judgement


def check(region: Region, candidate: Candidate, job: Job) -> Verdict:
    """Validate a candidate without timing it: for a part whose speed only the whole can tell.
    Raises SandboxError.
    """
    checks = contract(region, candidate)
    verdict = Verdict(tuple(checks))
    if verdict.passed:
        with _child(job) as child:
            verdict = _validated(
                _trial(region, candidate, replace(job, examples=None), child), checks
            )
            child.usable = child.usable and (verdict.passed or not candidate.program.launches)
    telemetry.count("candidates_judged")
    return verdict


def build(
    region: Region, proposals: Sequence[Proposal], job: Job, target: Target
) -> tuple[Candidate | Rejected, ...]:
    """Compile kernel proposals for a region in a child that sees no GPU; one answer per proposal,
    in order. Raises SandboxError.
    """
    answers: list[Candidate | Rejected] = []
    left = list(proposals)
    while left:
        limits = limits_for(job.settings, torch.device("cpu"), visible_gpu=False)
        with fresh(limits, job.contract) as child:
            payloads = write_payloads(region.program, child.new_file())
            while left and child.usable:
                answers.append(_built(child, region.program, payloads, left.pop(0), target))
    for answer in answers:
        telemetry.count("candidates_built" if isinstance(answer, Candidate) else "builds_failed")
    return tuple(answers)


def evidence(judgement: Judgement, ranking: Ranking) -> dict[str, Any]:
    """The evidence of a choice as JSON: timing, checks, profile, how its process was confined."""
    return {
        "timing": _timing_json(judgement.timing, ranking),
        "checks": [_check_json(check) for check in judgement.verdict.checks],
        "profile": judgement.verdict.profile,
        "sandbox": judgement.confinement.to_json() if judgement.confinement else None,
    }


def tried(judgement: Judgement) -> dict[str, Any]:
    """One line of "what was tried" as JSON."""
    candidate, decision, timing = judgement.candidate, judgement.decision, judgement.timing
    rejected = decision if isinstance(decision, Rejected) else None
    return {
        "label": candidate.label,
        "techniques": list(candidate.techniques),
        "origin": candidate.origin,
        "schedule": candidate.schedule,
        "decision": "rejected" if rejected else "accepted",
        "reason": rejected.reason if rejected else "",
        "detector": rejected.detector if rejected else "",
        "numbers": {name: _finite(value) for name, value in rejected.numbers.items()}
        if rejected
        else {},
        "speedup": timing.speedup if timing else None,
        "low": timing.low if timing else None,
        "high": timing.high if timing else None,
        "candidate_us": timing.candidate_us if timing else None,
        "error_ratio": _finite(judgement.verdict.worst_error_ratio),
    }


def _child(job: Job) -> AbstractContextManager[Child]:
    """A child for one candidate; warm if its code is ours, never for a stranger's."""
    limits = limits_for(job.settings, job.device, trust=job.trust)
    return lent(limits, job.contract) if job.trust == "own" else Child(limits, job.contract)


def _trial(region: Region, candidate: Candidate, job: Job, child: Child) -> Trial:
    subject = RegionSubject(region, job.contract, job.device, proven=job.examples is not None)
    return Trial(
        subject,
        candidate,
        job.contract,
        job.device,
        child,
        job.examples,
        book=job.book,
        profile=job.profile,
    )


def _validated(trial: Trial, checked: Sequence[Check]) -> Verdict:
    """`checked`: what passed before the child was started."""
    try:
        trial.load("candidate", trial.candidate)
    except CandidateFailure as error:
        return Verdict(
            (*checked, Check(error.detector, False, detail=f"{error.stage}: {error.found}"))
        )
    return Verdict((*checked, *validate(trial).checks))


def _measured(
    trial: Trial, ranking: Ranking, verdict: Verdict, job: Job
) -> tuple[Verdict, Timing | None]:
    """Time the candidate on trial, again in a fresh process where its score asks for it: the
    verdict with what timing checked.
    """
    elsewhere = other_device(job.device)
    where = "the same device" if elsewhere is None else "another device"
    job_again = job if elsewhere is None else replace(job, device=elsewhere, book={})
    assert isinstance(trial.candidate, Candidate)
    assert isinstance(trial.subject, RegionSubject)
    region, candidate = trial.subject.region, trial.candidate
    gpu: dict[str, Any] = {"before": gpu_state(job.device)}
    first = _timed(trial, ranking, job, gpu)
    found = confirm(
        first, lambda: _timed_afresh(region, candidate, ranking, job_again), job.best_score, where
    )
    gpu["after"] = gpu_state(job.device)
    verdict = replace(verdict, checks=(*verdict.checks, *found.checks))
    summary, quoted = found.measurement.summary, score(found.measurement.summary, job.plan)
    details = {**found.facts, "gpu": gpu}
    telemetry.record("judge", "timed", trial.subject.key[:12], label=candidate.label, **details)
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
        profile=job.plan.profile,
        score=quoted,
        details=details,
    )
    return verdict, timing


def _timed(trial: Trial, ranking: Ranking, job: Job, gpu: dict[str, Any]) -> Timed:
    """The candidate against the best baseline in the trial's child; whether others timed there
    meanwhile goes into `gpu`.

    Nobody waits while the baseline is compiled. Raises CandidateFailure.
    """
    try:
        trial.load("baseline", ranking.best)
    except CandidateFailure as error:
        raise CandidateFailure(
            "timing", f"the baseline could not be loaded beside it: {error.found}", "timing"
        ) from error
    with exclusive(job.device, "timing") as gpu["shared"]:
        found = time_slots(trial, replace(job.plan, margin=job.settings.margin))
    trial.let_go()
    fastest_us = min(summary.b_us for summary in found.measurement.summaries.values())
    assert isinstance(trial.candidate, Candidate)
    return replace(
        found,
        checks=(
            *found.checks,
            roofline(work(trial.candidate.program), ceiling(job.device), fastest_us),
        ),
    )


def _timed_afresh(region: Region, candidate: Candidate, ranking: Ranking, job: Job) -> Timed:
    """The same in a process that has run nothing else. Raises CandidateFailure."""
    with fresh(limits_for(job.settings, job.device, trust=job.trust), job.contract) as child:
        trial = _trial(region, candidate, job, child)
        for distribution in ("normal", "shifted"):
            trial.draw(distribution)
        trial.load("candidate", candidate)
        return _timed(trial, ranking, job, {})


def _built(
    child: Child, program: Program, payloads: list[Any], proposal: Proposal, target: Target
) -> Candidate | Rejected:
    path = child.new_file()
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
        built = read_program(answer["program"], [*answer["payloads"][:2], str(path)])
    except CandidateFailure as error:
        return Rejected(error.found, error.detector)
    except (ProgramError, SandboxError, KeyError, TypeError, ValueError) as error:
        return Rejected(f"the build yielded no Program: {error}", "contract")
    finally:
        Path(path).unlink(missing_ok=True)
    return Candidate(built, "eager", "kernels", (proposal.family,))


def _timing_json(timing: Timing | None, ranking: Ranking) -> dict[str, Any] | None:
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
        "score": conservative(timing.low) if timing.score is None else timing.score,
        "pairs": timing.pairs,
        "baselines_us": dict(ranking.medians_us),
        "details": dict(timing.details),
    }


def _check_json(check: Check) -> dict[str, Any]:
    return {
        "name": check.name,
        "passed": check.passed,
        "value": _finite(check.value),
        "limit": _finite(check.limit),
        "detail": check.detail,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
