"""Evaluates candidates that are sources: is a `ModelNew` right, and is it faster than the best way
to run the reference.

Two child processes: one runs the reference (eager, float64, compiled), the other runs the candidate
and nothing else. The first stays for the next candidate of the same reference; a candidate's process
ends with it. What a candidate does wrong comes back as a `Rejected` value that costs this candidate
only. A reference that cannot be used is a `ReferenceFailure`; any other SandboxError means that this
machine cannot evaluate at all. It prints nothing, and writes no file but the GPU's timing lock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from secrets import randbits
from types import TracebackType
from typing import TypeAlias

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.gpu_lock import lock_gpu
from torch_cudal1.device.gpu_state import read_gpu_state
from torch_cudal1.ir.records import (
    Accepted,
    CheckResult,
    Contract,
    Decision,
    Rejected,
    Timing,
    Verdict,
)
from torch_cudal1.judge.benchmark.candidate_timing import BenchmarkResult
from torch_cudal1.judge.benchmark.cross_process import ChildBatchTimer
from torch_cudal1.judge.benchmark.quoted_speedup import Unstable, score_measurement
from torch_cudal1.judge.benchmark.source_timing import time_source
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS, TimingProfile
from torch_cudal1.judge.checks.environment import ENV_DIFF_END
from torch_cudal1.judge.checks.registry import select_checks
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.static.contract import check_source_contract
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.evaluate.confirm import confirm_measurement
from torch_cudal1.judge.evaluate.decide import PAPER_SUCCESS, decide
from torch_cudal1.judge.evaluate.source_baselines import (
    Baselines,
    LostReferenceProcess,
    name_slot,
    rank_source_baselines,
)
from torch_cudal1.judge.evaluate.source_processes import RunningReference, SourceProcesses
from torch_cudal1.judge.profiles import ProfileName, profile_for
from torch_cudal1.judge.reference.inputs import make_inputs
from torch_cudal1.judge.reference.source_reference import (
    SourceCandidate,
    SourceReference,
)
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.sandbox.confinement_level import Confinement
from torch_cudal1.judge.sandbox.fork_server import ForkServer
from torch_cudal1.judge.sandbox.limits import Trust

__all__ = [
    "Progress",
    "SourceEvaluation",
    "SourceEvaluationConfig",
    "SourceEvaluator",
    "evaluate_source",
]

Progress: TypeAlias = Callable[[str, float | None], None]
# What validation may take, from the start of the processes on. A typical pair takes 5 to 12 s at
# `fast` on two busy cores (benchmarks/LOG.md).
_VALIDATION_LIMIT_S: Mapping[ProfileName, float] = {
    "fast": 300,
    "standard": 1_200,
    "strict": 3_600,
}


@dataclass(frozen=True)
class SourceEvaluationConfig:
    """How candidates that are sources are evaluated.

    `gradients`: the candidate must have the reference's gradients too. `drop_in`: it takes the
    reference's place in every mode and form that the reference takes; else it will only run for
    inference on inputs of the examples' form, as a Program under a guard does, and only that is
    checked. `trust`: in the reference; a candidate is never trusted. `all_pairs`: all pairs are
    measured, also where the first ones show that the candidate is not fast enough, for callers that
    want the speed-up itself and not a decision.
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
class SourceEvaluation:
    """The decision on one candidate with its evidence.

    `baselines`: None if this reference's were not benchmarked yet. `confinement`: of its process, None if
    none was started. `elapsed_s`: seconds of each step, checks by their labels.
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
class _Steps:
    """Reports each step as it begins, and keeps how long each took. `limit_s`: of validation, from
    now on.
    """

    progress: Progress
    limit_s: float
    seconds: dict[str, float] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)

    @property
    def limit_at(self) -> float:
        """When validation must have ended, on the monotonic clock."""
        return self.begin + self.limit_s

    @contextmanager
    def run_step(self, name: str, fraction: float | None = None) -> Iterator[None]:
        self.progress(name, fraction)
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin

    def wrap_check(self, check: CheckSpec) -> CheckSpec:
        def run(trial: Trial) -> list[CheckResult]:
            # Between checks for what the reference takes; a request to the candidate ends then, too.
            if time.monotonic() > self.limit_at:
                spent_s, reason = time.monotonic() - self.begin, self._describe_limit(check)
                return [CheckResult("resource", False, spent_s, self.limit_s, reason)]
            with self.run_step(check.label):
                return check.run(trial)

        return replace(check, run=run)

    def _describe_limit(self, check: CheckSpec) -> str:
        return f"seconds of validation, before {check.label!r}: smaller inputs take less time"


class SourceEvaluator:
    """Evaluates candidates one after the other, each in a process of its own. Use it as a context
    manager.

    `ahead`: start the next process while a candidate is judged (never while it is timed): for many
    candidates, and always where two processes time each. `fork_server`: forks all processes, which
    then share one address layout: for candidates of which nothing is stored.
    """

    def __init__(
        self,
        config: SourceEvaluationConfig,
        progress: Progress | None = None,
        *,
        ahead: bool = False,
        fork_server: ForkServer | None = None,
    ) -> None:
        self.config = config
        self._progress: Progress = progress or (lambda step, fraction: None)
        self._processes = SourceProcesses(
            config.settings,
            config.contract,
            config.device,
            trust=config.trust,
            ahead=ahead or TIMING_PLANS[config.profile].processes > 1,
            fork_server=fork_server,
        )

    def __enter__(self) -> SourceEvaluator:
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
        self._processes.close()

    def evaluate(
        self, reference_text: str, candidate_text: str, *, timed: bool = True
    ) -> SourceEvaluation:
        """Evaluate one candidate against one reference. Without `timed` it is only validated, and so
        never accepted.

        Raises ReferenceFailure for a reference that cannot be used, another SandboxError if no
        child can be had here.
        """
        candidate = SourceCandidate(candidate_text)
        profile = profile_for(self.config.profile)
        steps = _Steps(self._progress, _VALIDATION_LIMIT_S[profile.name])
        # From the text alone: a source that does not parse or defines no `ModelNew` starts no
        # process.
        verdict = Verdict(tuple(check_source_contract(candidate)), self.config.profile)
        evaluation = SourceEvaluation(
            candidate, decide(verdict, None, self.config.settings), verdict
        )
        if verdict.passed:
            with self._processes.open(reference_text, steps.run_step) as (child, loaded):
                trial = Trial(
                    *(
                        loaded.reference,
                        candidate,
                        self.config.contract,
                        self.config.device,
                        child,
                        loaded.examples,
                    ),
                    profile=profile,
                    gradients=self.config.gradients,
                )
                evaluation = self._evaluate_loaded(
                    trial, loaded, steps, verdict=verdict, timed=timed
                )
        telemetry.count("candidates_judged")
        telemetry.record("judge", "pair", candidate.digest[:12], **_summarise(evaluation))
        return replace(evaluation, elapsed_s=dict(steps.seconds))

    def _evaluate_loaded(
        self,
        trial: Trial,
        loaded: RunningReference,
        steps: _Steps,
        *,
        verdict: Verdict,
        timed: bool,
    ) -> SourceEvaluation:
        trial.child.given_up_at = steps.limit_at
        verdict = self._validate(trial, verdict, steps)
        # The measurement has seconds of its own.
        trial.child.given_up_at = math.inf
        timing = None
        if verdict.passed and timed:
            self._processes.wait_for_next()  # nothing may start while the clock runs
            with steps.run_step("baselines"):
                loaded, baselines = self._rank_baselines(loaded)
                # A baseline that ended the reference's process has made a new one necessary.
                trial.reference = loaded.reference
            with steps.run_step("timing"):
                verdict, timing = self._measure(trial, verdict, baselines)
        decision = _decide(verdict, timing, self.config)
        assert isinstance(trial.candidate, SourceCandidate)
        return SourceEvaluation(
            trial.candidate, decision, verdict, loaded.baselines, trial.child.confinement
        )

    def _validate(self, trial: Trial, verdict: Verdict, steps: _Steps) -> Verdict:
        with steps.run_step("load"):
            loaded = _load_candidate(trial)
        # A module that cannot be imported or constructed cannot be asked anything else.
        checks = (*verdict.checks, loaded)
        if loaded.passed:
            checks_to_run = [
                steps.wrap_check(check)
                for check in select_checks(trial.profile, drop_in=self.config.drop_in)
            ]
            checks += validate(trial, checks=checks_to_run).checks
        return replace(verdict, checks=checks)

    def _measure(
        self, trial: Trial, verdict: Verdict, baselines: Baselines
    ) -> tuple[Verdict, Timing | None]:
        """The verdict with what timing checked, and the measurement if all of that passed."""
        try:
            confirmed = confirm_measurement(
                self._time_candidate(trial, baselines),
                lambda: self._time_in_new_process(trial, baselines),
                # There is no best score of a task here to compare with.
                None,
                repeat=lambda: self._time_candidate(trial, baselines),
            )
        except CandidateFailure as error:
            failed = CheckResult(error.detector, False, detail=f"{error.stage}: {error.found}")
            return replace(verdict, checks=(*verdict.checks, failed)), None
        verdict = replace(verdict, checks=(*verdict.checks, *confirmed.checks))
        if verdict.passed:
            # Timed calls are thousands more, in which something may be changed for good.
            late = validate(trial, checks=(ENV_DIFF_END,))
            verdict = replace(verdict, checks=(*verdict.checks, *late.checks))
        summary, quoted = (
            confirmed.measurement.summary,
            score_measurement(confirmed.measurement.summary, confirmed.measurement.plan),
        )
        # A `Timing` cannot be built without a passed verdict.
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
            profile=self.config.profile,
            score=quoted,
            details={**confirmed.facts, "gpu": read_gpu_state(self.config.device)},
        )
        return verdict, timing

    def _rank_baselines(self, loaded: RunningReference) -> tuple[RunningReference, Baselines]:
        """The reference and its benchmarked baselines; where a baseline ended the process, in a new
        one and without that baseline.
        """
        lost: dict[str, str] = {}
        # Seeds of the operating system's randomness, which no process can predict.
        sets = [
            make_inputs(
                loaded.reference,
                randbits(62),
                "normal",
                self.config.device,
                examples=loaded.examples,
            )
            # Two sets, so that successive timed calls have different values.
            for _ in range(2)
        ]
        while loaded.baselines is None:
            try:
                loaded.baselines = rank_source_baselines(
                    loaded.reference, sets, eager_only=self.config.profile == "cudal1", lost=lost
                )
            except LostReferenceProcess as error:
                # Eager is the reference itself: without it nothing can be timed.
                if error.name == "eager":
                    raise
                lost[error.name] = error.found
                # The new process knows nothing of the old one's slots and inputs.
                loaded = self._processes.restart_reference(loaded.reference.text)
        return loaded, loaded.baselines

    def _time_candidate(self, trial: Trial, baselines: Baselines) -> BenchmarkResult:
        assert isinstance(trial.reference, SourceReference)
        slot = name_slot(trial.reference, baselines.best)
        side = ChildBatchTimer(trial.reference.oracle, slot, list(baselines.sets))
        margin = None if self.config.all_pairs else self.config.settings.margin
        # Work of other processes on this GPU would be in the samples.
        with lock_gpu(self.config.device, "timing"):
            return time_source(
                trial, side, replace(TIMING_PLANS[self.config.profile], margin=margin)
            )

    def _time_in_new_process(self, trial: Trial, baselines: Baselines) -> BenchmarkResult:
        """The same with the candidate in a process that has run nothing else. Raises
        CandidateFailure.
        """
        started = self._processes.take_next()
        with started or nullcontext(), trial.open_in_new_process(started) as other:
            return self._time_candidate(other, baselines)


def evaluate_source(
    reference_text: str,
    candidate_text: str,
    config: SourceEvaluationConfig,
    progress: Progress | None = None,
) -> SourceEvaluation:
    """Judge one candidate against one reference in fresh processes. Raises as
    `SourceEvaluator.evaluate` does.
    """
    with SourceEvaluator(config, progress) as evaluator:
        return evaluator.evaluate(reference_text, candidate_text)


def _load_candidate(trial: Trial) -> CheckResult:
    """Import the candidate and construct it."""
    try:
        trial.load("candidate", trial.candidate)
    except CandidateFailure as error:
        # "load_source" names the request; the table of checks calls this one `contract`.
        name = "contract" if error.detector == "load_source" else error.detector
        return CheckResult(name, False, detail=f"loading the candidate: {error.found}")
    return CheckResult("contract", True, detail="imported and constructed")


def _decide(verdict: Verdict, timing: Timing | None, config: SourceEvaluationConfig) -> Decision:
    """As for any candidate; under `cudal1` by the paper's rule: success is a score above 1.01 over
    eager.
    """
    # Under `cudal1` a wrong or untimed candidate is refused as anywhere else.
    if config.profile != "cudal1" or timing is None or timing.score is None or not verdict.passed:
        return decide(verdict, timing, config.settings)
    if timing.score > PAPER_SUCCESS:
        return Accepted(timing)
    reason = f"the score over eager is {timing.score:.2f}; a success is above {PAPER_SUCCESS}"
    return Rejected(reason, "timing", {"score": timing.score}, timing)


def _summarise(evaluation: SourceEvaluation) -> dict[str, str]:
    rejected = evaluation.decision if isinstance(evaluation.decision, Rejected) else None
    return (
        {"detector": rejected.detector, "reason": rejected.reason}
        if rejected
        else {"detector": "", "reason": ""}
    )
