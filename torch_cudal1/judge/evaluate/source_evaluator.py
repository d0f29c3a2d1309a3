"""The judge's front door for sources: is somebody's `ModelNew` right, and is it faster than the
best way to run the reference?

Two child processes: the oracle runs the reference (eager, float64, compiled), the other one runs
the candidate and nothing else. The oracle stays for the next candidate of the same reference; a
candidate's process ends with it. Whatever a candidate does wrong comes back as a `Rejected` value
that costs this candidate only. A reference that cannot be used is a `ReferenceFailure`; any other
SandboxError means that this machine cannot judge at all. It prints nothing, and writes no file but
the GPU's timing lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from secrets import randbits
from types import TracebackType
from typing import TypeAlias

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.gpu_lock import exclusive
from torch_cudal1.device.gpu_state import gpu_state
from torch_cudal1.ir.records import Accepted, Check, Contract, Decision, Rejected, Timing, Verdict
from torch_cudal1.judge.benchmark.candidate_timing import Timed
from torch_cudal1.judge.benchmark.cross_process import ChildSpinner
from torch_cudal1.judge.benchmark.source_timing import time_pair
from torch_cudal1.judge.checks import Detector
from torch_cudal1.judge.checks.profiles import TIMING_PLANS, ProfileName, TimingProfile, profile_for
from torch_cudal1.judge.checks.static.contract import source_contract
from torch_cudal1.judge.checks.validate import detectors_of, validate
from torch_cudal1.judge.evaluate.confirm import confirm
from torch_cudal1.judge.evaluate.decide import PAPER_SUCCESS, Unstable, decide, score
from torch_cudal1.judge.evaluate.source_baselines import Baselines, LostOracle, rank, slot_of
from torch_cudal1.judge.reference.inputs import make_inputs
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import (
    PairSubject,
    SourceCandidate,
    read_reference,
)
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, limits_for
from torch_cudal1.judge.sandbox.confinement_level import Confinement
from torch_cudal1.judge.sandbox.limits import Trust

__all__ = ["PairCourt", "PairJob", "PairJudgement", "Progress", "judge_pair"]

Progress: TypeAlias = Callable[[str, float | None], None]
_UNIT_S: Mapping[ProfileName, float] = {
    "fast": 600,
    "standard": 1_800,
    "strict": 7_200,
}  # a candidate slower than that is not worth it


@dataclass(frozen=True)
class PairJob:
    """Under what pairs are judged.

    `gradients`: the candidate must have the reference's gradients too. `drop_in`: it takes the
    reference's place in every mode and form that the reference takes; else it will only run for
    inference on inputs of the examples' form, as a Program under a guard does, and is asked about
    nothing else. `trust`: in the reference; a candidate has none. `all_pairs`: the clock takes all
    its pairs, also where the first ones show that the candidate will not be fast enough: who asks
    what a candidate does in many calls, not whether to use it.
    """

    settings: Settings
    contract: Contract
    device: torch.device
    profile: TimingProfile = "fast"
    gradients: bool = True
    trust: Trust = "own"
    all_pairs: bool = False
    drop_in: bool = True


@dataclass(frozen=True)
class PairJudgement:
    """One candidate's fate with all its evidence.

    `baselines`: None if this reference's were not raced yet. `confinement`: of its process, None if
    none was started. `elapsed_s`: seconds of each step, detectors by their names.
    """

    candidate: SourceCandidate
    decision: Decision
    verdict: Verdict
    baselines: Baselines | None = None
    confinement: Confinement | None = None
    elapsed_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def timing(self) -> Timing | None:
        """The measurement, None if it was never reached."""
        return self.decision.timing


@dataclass
class _Bench:
    """A reference in the oracle's process: what it computes, its own examples, and its baselines
    once they have been raced.
    """

    subject: PairSubject
    examples: list[torch.Tensor]
    baselines: Baselines | None = None


@dataclass
class _Steps:
    """What is being done now, told as it begins, and how long everything took."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str, fraction: float | None = None) -> Iterator[None]:
        self.progress(name, fraction)
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin

    def around(self, detector: Detector) -> Detector:
        @wraps(detector)
        def run(trial: Trial) -> list[Check]:
            spent = sum(self.seconds.values())
            if spent > _UNIT_S[trial.profile.name]:
                return [
                    Check(
                        "resource",
                        False,
                        spent,
                        _UNIT_S[trial.profile.name],
                        "seconds of judging so far",
                    )
                ]
            with self.step(getattr(detector, "__name__", "detector")):
                return detector(trial)

        return run


class PairCourt:
    """Judges candidates one after the other, each in a process of its own. Use it as a context
    manager.

    `ahead`: start the next candidate's process while this one's is judged (never while it is
    timed); for many candidates.
    """

    def __init__(
        self, job: PairJob, progress: Progress | None = None, *, ahead: bool = False
    ) -> None:
        self.job = job
        self._progress: Progress = progress or (lambda what, fraction: None)
        self._ahead = ahead
        # Linux kills a child with the thread that started it, so these threads live as long as the
        # court.
        self._pool = ThreadPoolExecutor(2, "cudal1-judge")
        self._next: Future[Child] | None = None
        self._oracle: Child | None = None
        self._bench: _Bench | None = None

    def __enter__(self) -> PairCourt:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        self._dismiss()
        if self._next is not None:
            _close(self._next)
            self._next = None
        self._pool.shutdown()

    def judge(
        self, reference_text: str, candidate_text: str, *, timed: bool = True
    ) -> PairJudgement:
        """Judge one candidate against one reference. Without `timed` it is only validated, and so
        never accepted.

        Raises ReferenceFailure for a reference that cannot be used, another SandboxError if no
        child can be had here.
        """
        candidate = SourceCandidate(candidate_text)
        steps = _Steps(self._progress)
        verdict = Verdict(tuple(source_contract(candidate)), self.job.profile)
        found = PairJudgement(candidate, decide(verdict, None, self.job.settings), verdict)
        if verdict.passed:
            with self._seated(reference_text, steps) as (child, bench):
                trial = Trial(
                    *(
                        bench.subject,
                        candidate,
                        self.job.contract,
                        self.job.device,
                        child,
                        bench.examples,
                    ),
                    profile=profile_for(self.job.profile),
                    gradients=self.job.gradients,
                )
                found = self._heard(trial, bench, steps, verdict=verdict, timed=timed)
        telemetry.count("candidates_judged")
        telemetry.record("judge", "pair", candidate.digest[:12], **_brief(found))
        return replace(found, elapsed_s=dict(steps.seconds))

    @contextmanager
    def _seated(self, text: str, steps: _Steps) -> Iterator[tuple[Child, _Bench]]:
        """A clean child for the candidate, with the oracle of this reference beside it."""
        known = self._bench is not None and self._bench.subject.text == text
        if (
            self._oracle is None
            or not self._oracle.usable
            or (self.job.trust == "foreign" and not known)
        ):
            self._dismiss()
        with steps.step("start"):
            coming, self._next = self._next or self._start("foreign"), None
            try:
                self._oracle = self._oracle or self._start(self.job.trust).result()
                if not _alive(
                    coming.result()
                ):  # it waited, and what ran meanwhile may have cost it its memory
                    coming = self._start("foreign")
                child = coming.result()
            except BaseException:
                _close(coming)
                raise
        with child:
            if self._bench is None or not known:
                with steps.step("reference"):
                    self._bench = _read(self._oracle, text, self.job.device)
            self._next = self._start("foreign") if self._ahead else None
            yield child, self._bench

    def _start(self, trust: Trust) -> Future[Child]:
        return self._pool.submit(
            Child, limits_for(self.job.settings, self.job.device, trust=trust), self.job.contract
        )

    def _dismiss(self) -> None:
        if self._oracle is not None:
            self._oracle.close()
        self._oracle, self._bench = None, None

    def _heard(
        self, trial: Trial, bench: _Bench, steps: _Steps, *, verdict: Verdict, timed: bool
    ) -> PairJudgement:
        verdict = self._validated(trial, verdict, steps)
        timing = None
        if verdict.passed and timed:
            if self._next is not None:
                wait([self._next])  # nothing may start while the clock runs
            with steps.step("baselines"):
                bench, baselines = self._ranked(bench)
                trial.subject = bench.subject
            with steps.step("timing"):
                verdict, timing = self._timed(trial, verdict, baselines)
        decision = _decided(verdict, timing, self.job)
        assert isinstance(trial.candidate, SourceCandidate)
        return PairJudgement(
            trial.candidate, decision, verdict, bench.baselines, trial.child.confinement
        )

    def _validated(self, trial: Trial, verdict: Verdict, steps: _Steps) -> Verdict:
        with steps.step("load"):
            loaded = _loaded(trial)
        checks = (*verdict.checks, loaded)
        if loaded.passed:
            asked = [
                steps.around(detector)
                for detector in detectors_of(trial.profile, drop_in=self.job.drop_in)
            ]
            checks += validate(trial, detectors=asked).checks
        return replace(verdict, checks=checks)

    def _timed(
        self, trial: Trial, verdict: Verdict, baselines: Baselines
    ) -> tuple[Verdict, Timing | None]:
        """The verdict with what timing checked, and the measurement if all of that passed."""
        try:
            found = confirm(
                self._raced(trial, baselines), lambda: self._raced_afresh(trial, baselines), None
            )
        except CandidateFailure as error:
            failed = Check(error.detector, False, detail=f"{error.stage}: {error.found}")
            return replace(verdict, checks=(*verdict.checks, failed)), None
        verdict = replace(verdict, checks=(*verdict.checks, *found.checks))
        summary, quoted = (
            found.measurement.summary,
            score(found.measurement.summary, found.measurement.plan),
        )
        if isinstance(quoted, Unstable) or not verdict.passed:
            return verdict, None
        timing = Timing(
            verdict=verdict,
            baseline=baselines.best,
            candidate_us=summary.b_us,
            baseline_us=summary.a_us,
            speedup=summary.speedup,
            low=summary.low,
            high=summary.high,
            pairs=summary.pairs,
            baselines_us=baselines.medians_us,
            profile=self.job.profile,
            score=quoted,
            details={**found.facts, "gpu": gpu_state(self.job.device)},
        )
        return verdict, timing

    def _ranked(self, bench: _Bench) -> tuple[_Bench, Baselines]:
        """The reference and its raced baselines; in a new oracle, without the one at fault, where a
        baseline ended its process.
        """
        lost: dict[str, str] = {}
        sets = [
            make_inputs(
                bench.subject, randbits(62), "normal", self.job.device, examples=bench.examples
            )
            for _ in range(2)
        ]
        while bench.baselines is None:
            try:
                bench.baselines = rank(
                    bench.subject, sets, eager_only=self.job.profile == "cudal1", lost=lost
                )
            except LostOracle as error:
                if error.name == "eager":
                    raise
                lost[error.name] = error.found
                self._dismiss()
                self._oracle = self._start(self.job.trust).result()
                bench = self._bench = _read(self._oracle, bench.subject.text, self.job.device)
        return bench, bench.baselines

    def _raced(self, trial: Trial, baselines: Baselines) -> Timed:
        assert isinstance(trial.subject, PairSubject)
        slot = slot_of(trial.subject, baselines.best)
        side = ChildSpinner(trial.subject.oracle, slot, list(baselines.sets))
        margin = None if self.job.all_pairs else self.job.settings.margin
        with exclusive(self.job.device, "timing"):
            return time_pair(trial, side, replace(TIMING_PLANS[self.job.profile], margin=margin))

    def _raced_afresh(self, trial: Trial, baselines: Baselines) -> Timed:
        """The same with the candidate in a process that has run nothing else. Raises
        CandidateFailure.
        """
        with trial.elsewhere() as other:
            return self._raced(other, baselines)


def judge_pair(
    reference_text: str, candidate_text: str, job: PairJob, progress: Progress | None = None
) -> PairJudgement:
    """Judge one candidate against one reference in fresh processes. Raises as `PairCourt.judge`
    does.
    """
    with PairCourt(job, progress) as court:
        return court.judge(reference_text, candidate_text)


def _read(oracle: Child, text: str, device: torch.device) -> _Bench:
    try:
        subject, examples = read_reference(oracle, text, device)
    except SandboxError as error:
        raise ReferenceFailure(error.stage, error.found) from error
    if not any(subject.outputs):
        raise ReferenceFailure(
            "running the reference", f"its result holds no tensor: {subject.tree[:200]}"
        )
    return _Bench(subject, examples)


def _loaded(trial: Trial) -> Check:
    """Import the candidate and construct it."""
    try:
        trial.load("candidate", trial.candidate)
    except CandidateFailure as error:
        name = "contract" if error.detector == "load_source" else error.detector
        return Check(name, False, detail=f"loading the candidate: {error.found}")
    return Check("contract", True, detail="imported and constructed")


def _decided(verdict: Verdict, timing: Timing | None, job: PairJob) -> Decision:
    """As for any candidate; under `cudal1` by the paper's rule: success is a score above 1.01 over
    eager.
    """
    if job.profile != "cudal1" or timing is None or timing.score is None or not verdict.passed:
        return decide(verdict, timing, job.settings)
    if timing.score > PAPER_SUCCESS:
        return Accepted(timing)
    reason = f"the score over eager is {timing.score:.2f}; a success is above {PAPER_SUCCESS}"
    return Rejected(reason, "timing", {"score": timing.score}, timing)


def _brief(found: PairJudgement) -> dict[str, str]:
    rejected = found.decision if isinstance(found.decision, Rejected) else None
    return (
        {"detector": rejected.detector, "reason": rejected.reason}
        if rejected
        else {"detector": "", "reason": ""}
    )


def _alive(child: Child) -> bool:
    """Whether a process that has seen nothing yet answers; one that does not is closed."""
    try:
        child.call("drop", names=[])
    except CandidateFailure:
        child.close()
        return False
    return True


def _close(coming: Future[Child]) -> None:
    """Close a child that may still be starting."""
    if coming.exception() is None:
        coming.result().close()
