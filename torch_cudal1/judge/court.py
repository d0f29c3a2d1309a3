"""The judge's front door: which baseline is fastest, and is a candidate right and faster. One child process per question.

Everything a candidate does wrong comes back as a `Rejected` value; SandboxError means that this machine cannot judge at all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_cudal1 import observe
from torch_cudal1.errors import ProgramError, SandboxError
from torch_cudal1.judge.analysis import Facts, analyse
from torch_cudal1.judge.compare import grossly_equal
from torch_cudal1.judge.decide import choose_baseline, conservative, decide
from torch_cudal1.judge.sandbox import CandidateFailure, Child, limits_for
from torch_cudal1.judge.timing import summarise
from torch_cudal1.judge.transport import read_program, write_payloads
from torch_cudal1.judge.trial import Book, Outputs, Trial
from torch_cudal1.judge.validate import contract, validate
from torch_cudal1.program.model import Program
from torch_cudal1.records import (
    SCHEDULES,
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
from torch_cudal1.settings import Settings

if TYPE_CHECKING:
    from torch_cudal1.kernels import Proposal

__all__ = ["Job", "Judgement", "Ranking", "build", "check", "evidence", "judge", "rank_baselines", "tried"]

_TIMING_BUDGET_S = 10.0


@dataclass(frozen=True)
class Job:
    """Under what a region is judged. `examples`: real inputs in the order of the region's, parameters included.

    `book` remembers the secret input sets and what eager and float64 yield on them, for all candidates judged under this job.
    """

    settings: Settings
    contract: Contract
    device: torch.device
    examples: tuple[torch.Tensor, ...] | None = None
    book: Book = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Ranking:
    """The race of the baselines: the winner, medians in microseconds per call, and why others did not run."""

    best: Candidate
    medians_us: Mapping[str, float]
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """One candidate's fate with all its evidence."""

    candidate: Candidate
    decision: Decision
    verdict: Verdict

    @property
    def timing(self) -> Timing | None:
        """The measurement, None if it was never reached."""
        return self.decision.timing


def rank_baselines(region: Region, schedules: Iterable[Schedule], job: Job) -> Ranking:
    """Measure the region's reference Program under each schedule, eager always among them. Raises SandboxError."""
    facts = analyse(region.program)
    left = [name for name in SCHEDULES if name == "eager" or name in set(schedules)]
    failures: dict[str, str] = {}
    samples: dict[str, list[float]] = {}
    while left and not samples:
        samples = _race(region, left, job, facts, failures)
        left = [name for name in left if name not in failures]
    medians = {name: statistics.median(values) for name, values in samples.items()}
    best = choose_baseline(medians) if medians else "eager"
    observe.record("judge", "baselines", region.key[:12], best=best, medians_us=medians, failures=failures)
    schedule = next(name for name in SCHEDULES if name == best)
    return Ranking(Candidate(region.program, schedule, "baseline"), medians, failures)


def judge(region: Region, candidate: Candidate, ranking: Ranking, job: Job) -> Judgement:
    """Validate a candidate, time it against the best baseline if it is right, and decide. Raises SandboxError."""
    timing: Timing | None = None
    checks = contract(region, candidate)
    verdict = Verdict(tuple(checks))
    decision: Decision | None = None
    if verdict.passed:
        limits = limits_for(job.settings, job.device)
        with Child(limits, job.contract) as child:
            facts = analyse(region.program)
            trial = Trial(region, candidate, job.contract, job.device, facts, child, job.examples, book=job.book)
            verdict = _validated(trial, job)
            if verdict.passed:
                try:
                    timing = _measured(trial, ranking, verdict)
                except CandidateFailure as error:
                    decision = Rejected(f"{error.stage}: {error.found}", error.detector)
    decision = decision or decide(verdict, timing, job.settings)
    observe.count("candidates_judged")
    judgement = Judgement(candidate, decision, verdict)
    observe.record("judge", "accepted" if isinstance(decision, Accepted) else "rejected", region.key[:12], **tried(judgement))
    return judgement


def check(region: Region, candidate: Candidate, job: Job) -> Verdict:
    """Validate a candidate without timing it: for a part whose speed only the whole can tell. Raises SandboxError."""
    verdict = Verdict(tuple(contract(region, candidate)))
    if verdict.passed:
        with Child(limits_for(job.settings, job.device), job.contract) as child:
            facts = analyse(region.program)
            verdict = _validated(Trial(region, candidate, job.contract, job.device, facts, child, book=job.book), job)
    observe.count("candidates_judged")
    return verdict


def build(region: Region, proposals: Sequence[Proposal], job: Job, target: Target) -> tuple[Candidate | Rejected, ...]:
    """Compile kernel proposals for a region in a child that sees no GPU; one answer per proposal, in order. Raises SandboxError."""
    answers: list[Candidate | Rejected] = []
    left = list(proposals)
    while left:
        limits = limits_for(job.settings, torch.device("cpu"), visible_gpu=False)
        with Child(limits, job.contract) as child:
            payloads = write_payloads(region.program, child.new_file())
            while left and child.usable:
                answers.append(_built(child, region.program, payloads, left.pop(0), target))
    for answer in answers:
        observe.count("candidates_built" if isinstance(answer, Candidate) else "builds_failed")
    return tuple(answers)


def evidence(judgement: Judgement, ranking: Ranking) -> dict[str, Any]:
    """The evidence of a choice as JSON: timing, checks, profile."""
    return {
        "timing": _timing_json(judgement.timing, ranking),
        "checks": [_check_json(check) for check in judgement.verdict.checks],
        "profile": judgement.verdict.profile,
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
        "numbers": {name: _finite(value) for name, value in rejected.numbers.items()} if rejected else {},
        "speedup": timing.speedup if timing else None,
        "low": timing.low if timing else None,
        "high": timing.high if timing else None,
        "candidate_us": timing.candidate_us if timing else None,
        "error_ratio": _finite(judgement.verdict.worst_error_ratio),
    }


def _validated(trial: Trial, job: Job) -> Verdict:
    try:
        trial.load("candidate", trial.candidate)
    except CandidateFailure as error:
        return Verdict((Check(error.detector, False, detail=f"{error.stage}: {error.found}"),))
    return validate(trial)


def _measured(trial: Trial, ranking: Ranking, verdict: Verdict) -> Timing:
    try:
        trial.load("baseline", ranking.best)
    except CandidateFailure as error:
        raise CandidateFailure("timing", f"the baseline could not be loaded beside it: {error.found}", "timing") from error
    names = [sample.name for sample in list(trial.samples.values())[:2]]
    answer = trial.child.call("time", a="baseline", b="candidate", sets=names, budget_s=_TIMING_BUDGET_S)
    try:
        summary = summarise([(float(a), float(b)) for a, b in answer["pairs"]])
    except (KeyError, TypeError, ValueError) as error:
        raise CandidateFailure("timing", f"unusable samples: {error}", "protocol") from error
    facts = {"wall_us": [summary.a_us, summary.b_us], "device_us": answer.get("device_us"), "steady": summary.steady}
    observe.record("judge", "timed", trial.region.key[:12], label=trial.candidate.label, **facts)
    return Timing(
        verdict=verdict,
        baseline=ranking.best.label,
        candidate_us=summary.b_us,
        baseline_us=summary.a_us,
        speedup=summary.speedup,
        low=summary.low,
        high=summary.high,
        pairs=summary.pairs,
        baselines_us=dict(ranking.medians_us),
    )


def _race(
    region: Region, schedules: Sequence[Schedule], job: Job, facts: Facts, failures: dict[str, str]
) -> dict[str, list[float]]:
    """One race in one child; what fails goes into `failures`. Empty when the child was lost, so that the rest can try again."""
    with Child(limits_for(job.settings, job.device), job.contract) as child:
        eager = Candidate(region.program, "eager", "baseline")
        trial = Trial(region, eager, job.contract, job.device, facts, child, job.examples, book=job.book)
        try:
            names = [trial.draw("normal").name, trial.draw("shifted").name]
        except CandidateFailure as error:
            failures.update(dict.fromkeys(schedules, error.found))
            return {}
        ready, expected = [], None
        for name in schedules:
            reason, outputs = _tried_schedule(trial, name, names[0], expected)
            expected = outputs if name == "eager" else expected
            if reason:
                failures[name] = reason
            else:
                ready.append(name)
            if not child.usable:
                return {}
        return _raced(child, ready, names, failures)


def _tried_schedule(trial: Trial, name: Schedule, inputs: str, expected: Outputs | None) -> tuple[str, Outputs | None]:
    """Load the reference under a schedule and call it once: why it is out of the race ("" if it is not), and its outputs."""
    try:
        trial.load(name, Candidate(trial.region.program, name, "baseline"))
        outputs = trial.call_slot(name, inputs).outputs
    except CandidateFailure as error:
        return error.found, None
    if expected is not None and not all(grossly_equal(a, b) for a, b in zip(outputs, expected, strict=True)):
        return "its result is not eager's", outputs
    return "", outputs


def _raced(child: Child, ready: Sequence[str], sets: Sequence[str], failures: dict[str, str]) -> dict[str, list[float]]:
    if not ready:
        return {}
    try:
        answer = child.call("bench", slots=list(ready), sets=list(sets), budget_s=_TIMING_BUDGET_S)
        return {name: [float(value) for value in answer["samples"][name]] for name in ready}
    except CandidateFailure as error:
        failures[ready[-1]] = f"the race ended: {error.found}"  # the last one is the least proven; the others run again
        return {}


def _built(child: Child, program: Program, payloads: list[Any], proposal: Proposal, target: Target) -> Candidate | Rejected:
    path = child.new_file()
    sm = int(target.arch.removeprefix("sm_")) if target.arch.startswith("sm_") else 0
    try:
        answer = child.call(
            "build", program=program.to_json(), payloads=payloads, proposal=proposal.to_json(), sm=sm, path=str(path)
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
        "score": conservative(timing.low),
        "pairs": timing.pairs,
        "baselines_us": dict(ranking.medians_us),
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
