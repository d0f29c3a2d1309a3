"""The race of the ways to run a region that PyTorch itself offers: the fastest is what a candidate
must beat.

All of them run in one child, in turns. What cannot run, or does not yield eager's result, is out
with the reason, and never counts as slow. The same race for sources is in `baselines`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.device.gpu_lock import lock_gpu, working_s
from torch_cudal1.device.gpu_memory import release_cached_memory
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.records import DIFFERS_FROM_EAGER, Candidate, Region
from torch_cudal1.ir.schedule import EAGER, SCHEDULES, Schedule
from torch_cudal1.judge.evaluate.decide import choose_baseline
from torch_cudal1.judge.evaluate.evaluator import BaselineRanking, EvaluationConfig
from torch_cudal1.judge.reference.compare import is_grossly_equal
from torch_cudal1.judge.reference.region_reference import Outputs, RegionReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits
from torch_cudal1.judge.sandbox.worker_pool import acquire

__all__ = ["rank_baselines"]

_BUDGET_S = 4.0
_RANDOM_SEED = 20_260_101


def rank_baselines(
    region: Region, schedules: Iterable[Schedule], job: EvaluationConfig
) -> BaselineRanking:
    """Measure the region's reference Program under each schedule, eager always among them. Raises
    SandboxError.
    """
    left = [name for name in SCHEDULES if name == EAGER or name in set(schedules)]
    failures: dict[str, str] = {}
    ready_s: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    while left and not samples:
        samples = _race(region, left, job, failures, ready_s)
        left = [name for name in left if name not in failures]
    medians = {name: statistics.median(values) for name, values in samples.items()}
    best = choose_baseline(medians) if medians else "eager"
    telemetry.record(
        "judge", "baselines", region.key[:12], best=best, medians_us=medians, failures=failures
    )
    schedule = next(name for name in SCHEDULES if name == best)
    return BaselineRanking(
        Candidate(region.program, schedule, "baseline"), medians, failures, ready_s
    )


def _race(
    region: Region,
    schedules: Sequence[Schedule],
    job: EvaluationConfig,
    failures: dict[str, str],
    ready_s: dict[str, float],
) -> dict[str, list[float]]:
    """One race in one child; what fails goes into `failures`, what the others took until they had
    answered once into `ready_s`.

    Empty when the child was lost, so that the rest can try again.
    """
    with acquire(make_limits(job.settings, job.device), job.contract) as child:
        eager = Candidate(region.program, EAGER, "baseline")
        subject = RegionReference(region, job.contract, job.device, proven=job.examples is not None)
        trial = Trial(
            subject,
            eager,
            job.contract,
            job.device,
            child,
            job.examples,
            reference_cache=job.reference_cache,
            profile=job.profile,
        )
        try:
            sets = [trial.draw("normal").name, trial.draw("shifted").name]
        except CandidateFailure as error:
            failures.update(dict.fromkeys(schedules, _gist(error.found)))
            return {}
        ready, expected = [], None
        for name in schedules:
            reason, outputs, begun = _graph_of_what_failed(name, failures), None, working_s()
            if not reason:
                reason, outputs = _tried(trial, name, sets[0], expected)
                if name == EAGER and _blind(outputs) and trial.examples is not None:
                    sets, reason, outputs = _on_examples(trial)
            expected = outputs if name == EAGER else expected
            if reason:
                failures[name] = reason
            else:
                ready.append(name)
                ready_s.setdefault(
                    name, working_s() - begun
                )  # a second race finds what the first one compiled
            if not child.usable:
                return {}
        del outputs, expected
        release_cached_memory(job.device)
        with lock_gpu(job.device, "race"):
            return _raced(child, ready, sets, failures)


def _on_examples(trial: Trial) -> tuple[list[str], str, Outputs | None]:
    """Eager on the user's own inputs, where drawn ones leave nothing to tell the others apart by:
    the set, and as `_tried`.
    """
    try:
        sets = [trial.draw("examples").name]
    except CandidateFailure as error:
        return [], _gist(error.found), None
    return sets, *_tried(trial, EAGER, sets[0], None)


def _blind(outputs: Outputs | None) -> bool:
    """Whether one of them holds no number at all, so that nothing can be compared there."""
    return any(out is not None and not _has_numbers(out) for out in outputs or ())


def _has_numbers(out: torch.Tensor) -> bool:
    return not out.is_floating_point() or not out.numel() or bool(out.isfinite().any())


def _graph_of_what_failed(name: Schedule, failures: dict[str, str]) -> str:
    """Why a CUDA graph need not be tried: what it would capture has failed, and would be compiled
    once more to fail again.
    """
    base = name.base
    return f"{base} failed: {failures[base]}" if name.cuda_graph and base in failures else ""


def _tried(
    trial: Trial, name: Schedule, inputs: str, expected: Outputs | None
) -> tuple[str, Outputs | None]:
    """Load the reference under a schedule and call it once: why it is out of the race ("" if it is
    not), and its outputs.
    """
    assert isinstance(trial.candidate, Candidate)  # the reference Program itself
    try:
        trial.load(name, Candidate(trial.candidate.program, name, "baseline"))
        if is_random_program(trial.candidate.program):
            trial.child.call(
                "surroundings", stir=_RANDOM_SEED
            )  # the same numbers for each, or it is not the same function
        outputs = trial.call_slot(name, inputs).outputs
    except CandidateFailure as error:
        return _gist(error.found), None
    if expected is not None and not all(
        is_grossly_equal(a, b) for a, b in zip(outputs, expected, strict=True)
    ):
        return DIFFERS_FROM_EAGER, outputs
    return "", outputs


def _raced(
    child: Child, ready: Sequence[str], sets: Sequence[str], failures: dict[str, str]
) -> dict[str, list[float]]:
    if not ready:
        return {}
    try:
        answer = child.call("bench", slots=list(ready), sets=list(sets), budget_s=_BUDGET_S)
        return {name: [float(value) for value in answer["samples"][name]] for name in ready}
    except CandidateFailure as error:
        failures[ready[-1]] = (
            # the last one is the least proven; the others run again
            f"the race ended: {_gist(error.found)}"
        )
        return {}


def _gist(found: str) -> str:
    """What failed and why on one line: the first and the last one of a traceback."""
    lines = [line.strip() for line in found.splitlines() if line.strip()]
    return " ".join(lines) if len(lines) < 3 else f"{lines[0]} ... {lines[-1]}"
