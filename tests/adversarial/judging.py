"""Judges the two sides of a case: the reference in one oracle child for all cases, each candidate in a fresh process of its own.

Starting a process takes longer than judging a small module in it, so the next one starts while the current one is judged. Nothing
is decided here: detectors and verdict are the judge's.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from secrets import randbits
from typing import Literal, TypeAlias

import torch

from tests.adversarial.case import DETECTORS, CaseFile, Profile
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Candidate, CheckResult, Contract, Region
from torch_cudal1.judge.benchmark.cross_process import ChildBatchTimer
from torch_cudal1.judge.benchmark.source_timing import time_source
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS
from torch_cudal1.judge.checks.registry import select_checks
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.static.contract import check_source_contract, contract
from torch_cudal1.judge.checks.static.cubin_scan import cubin_scan
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.evaluate.source_baselines import name_slot, rank_source_baselines
from torch_cudal1.judge.profiles import PROFILES
from torch_cudal1.judge.reference.inputs import make_inputs
from torch_cudal1.judge.reference.region_reference import RegionReference
from torch_cudal1.judge.reference.source_reference import (
    SourceCandidate,
    SourceReference,
    read_reference,
)
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits

__all__ = ["Bench", "Side", "TooBusy", "bench", "failures"]

TERMS = {"cpu": Contract(), "cuda": Contract(rights=("conv",))}  # what PyTorch's defaults grant
_PLAN = replace(TIMING_PLANS["fast"], rounds=1, budget_s=5.0)
_TRIES = 4  # of a measurement, on machines that do other work
_DEADLINE_S: dict[Profile, float] = {"fast": 20.0, "standard": 60.0, "strict": 300.0}
Side: TypeAlias = Literal["cheat", "honest"]


def failures(checks: list[CheckResult]) -> list[str]:
    """The names of the checks that failed, in order, each once."""
    return list(dict.fromkeys(check.name for check in checks if not check.passed))


@dataclass
class Bench:
    """Where cases are judged: the oracle, the device, and the child that is being started for the next candidate."""

    device: torch.device
    _starter: ThreadPoolExecutor
    _next: Future[Child] | None = None
    _oracle: Child | None = None
    _read: dict[str, tuple[SourceReference, list[torch.Tensor]]] = field(default_factory=dict)

    @property
    def terms(self) -> Contract:
        """Under which cases are judged."""
        return TERMS[self.device.type]

    def judge(
        self, file: CaseFile, side: Side, profile: Profile = "fast", *, to_the_end: bool = False
    ) -> list[CheckResult]:
        """The checks of one side of a case, up to the first that fails, or all of them."""
        module = file.module
        if file.case.form == "source":
            reference = (
                getattr(module, "TWIN_REFERENCE", module.REFERENCE)
                if side == "honest"
                else module.REFERENCE
            )
            return self.source(
                reference,
                getattr(module, side.upper()),
                profile,
                to_the_end=to_the_end,
                timed=file.case.timed,
            )
        return self._program(module.reference(), getattr(module, side)(), profile, to_the_end)

    def source(
        self,
        reference: str,
        text: str,
        profile: Profile,
        *,
        to_the_end: bool = False,
        timed: bool = False,
    ) -> list[CheckResult]:
        """The checks of a source candidate."""
        candidate = SourceCandidate(text)
        checks = check_source_contract(candidate)
        if failures(checks):
            return checks
        source_reference, examples = self._read_reference(reference)
        with self._child(profile) as child:
            trial = Trial(source_reference, candidate, self.terms, self.device, child, examples)
            checks += _run_checks(trial, profile, to_the_end)
            return checks + (
                _time_until_quiet(trial, source_reference)
                if timed and child.usable and not failures(checks)
                else []
            )

    def _program(
        self, region: Region, candidate: Candidate, profile: Profile, to_the_end: bool
    ) -> list[CheckResult]:
        checks = contract(region, candidate)
        if to_the_end or not failures(checks):
            checks += cubin_scan(candidate.program)
        if (failures(checks) and not to_the_end) or region.program.device != self.device.type:
            return checks
        with self._child(profile) as child:
            trial = Trial(
                RegionReference(region, self.terms, self.device),
                candidate,
                self.terms,
                self.device,
                child,
            )
            return checks + _run_checks(trial, profile, to_the_end)

    def _read_reference(self, reference: str) -> tuple[SourceReference, list[torch.Tensor]]:
        if self._oracle is None or not self._oracle.usable:
            self._oracle, self._read = self._start(), {}
        if reference not in self._read:
            self._read[reference] = read_reference(self._oracle, reference, self.device)
        return self._read[reference]

    def _start(self) -> Child:
        limits = make_limits(Settings(candidate_timeout_s=_DEADLINE_S["strict"]), self.device)
        return Child(replace(limits, threads=1), self.terms)

    @contextmanager
    def _child(self, profile: Profile) -> Iterator[Child]:
        ready = self._next or self._starter.submit(self._start)
        child = ready.result()
        child.limits = replace(child.limits, deadline_s=_DEADLINE_S[profile])
        self._next = self._starter.submit(self._start)
        with child:
            yield child

    def close(self) -> None:
        """End the processes that are still there."""
        if self._next is not None:
            self._next.result().close()
        if self._oracle is not None:
            self._oracle.close()


@contextmanager
def bench(device: torch.device) -> Iterator[Bench]:
    """A bench whose processes end with the block. Linux ends a child with the thread that started it, so that thread lives on.

    Cases are small, and threads that wait for each other cost more than they help: everything here has one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(1) as starter:
        running_bench = Bench(device, starter)
        try:
            yield running_bench
        finally:
            running_bench.close()
            torch.set_num_threads(threads)


def _run_checks(trial: Trial, profile: Profile, to_the_end: bool) -> list[CheckResult]:
    try:
        trial.load("candidate", trial.candidate)
    except CandidateFailure as error:
        return [
            CheckResult(
                "contract" if error.detector == "load_source" else error.detector,
                False,
                detail=error.found,
            )
        ]
    trial.gradients = True
    if not to_the_end:
        return list(validate(trial, PROFILES[profile]).checks)
    checks: list[CheckResult] = []
    for check in select_checks(PROFILES[profile]):
        checks += _run_check_alone(trial, profile, check)
        if not trial.child.usable:
            break
    return checks


def _run_check_alone(trial: Trial, profile: Profile, check: CheckSpec) -> list[CheckResult]:
    """One check, whatever the checks before it found. What it needs of them is made up where they stopped early."""
    try:
        checks = list(validate(trial, PROFILES[profile], checks=(check,)).checks)
    except (KeyError, IndexError, ValueError, AssertionError) as error:
        return [
            CheckResult(
                check.label,
                True,
                detail=f"could not be asked after an earlier failure: {error!r}",
            )
        ]
    with suppress(CandidateFailure):  # the check has reported it already
        while trial.samples and len(trial.samples) < 2:
            sample = trial.draw("normal")
            trial.results[sample.name] = trial.run(sample)
    return checks


class TooBusy(Exception):
    """This machine does too much else to time anything: there is no verdict on the candidate."""


def _time_until_quiet(trial: Trial, reference: SourceReference) -> list[CheckResult]:
    """What timing checks, against eager; noise passes on a later try. Raises TooBusy."""
    checks, is_quiet = list[CheckResult](), False
    for _ in range(_TRIES):
        checks = _time_once(trial, reference)
        # A check may pass because it could not tell, of a cheat too that has met too few calls yet.
        is_quiet = not any("the machine is busy" in check.detail for check in checks)
        if is_quiet and not {"unstable", "wall_slope"} & set(failures(checks)):
            break
    if "unstable" in failures(checks):
        raise TooBusy(next(check.detail for check in checks if not check.passed))
    # A check that cannot tell a difference from noise passes, which is no verdict.
    if not is_quiet and not failures(checks):
        raise TooBusy("this machine is too busy to tell two clocks apart")
    return [check for check in checks if check.name in DETECTORS]


def _time_once(trial: Trial, reference: SourceReference) -> list[CheckResult]:
    sets = [make_inputs(reference, randbits(62), "normal", trial.device) for _ in range(2)]
    baseline = rank_source_baselines(reference, sets, eager_only=True)
    side = ChildBatchTimer(
        reference.oracle, name_slot(reference, baseline.best), list(baseline.sets), keep=False
    )
    try:
        result = time_source(trial, side, _PLAN)
    except CandidateFailure as error:
        return [CheckResult(error.detector, False, detail=f"{error.stage}: {error.found}")]
    return [check for check in result.checks if check.name != "unstable"]
