"""Benchmarks the ways to run a region that PyTorch itself offers: a candidate must beat the fastest.

All of them run in one child, in turns. One that cannot run, or does not yield eager's result, is
excluded with the reason, and never counts as slow. `source_baselines` does the same for sources.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
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
# Any fixed number: it only matters that every schedule starts from the same one.
_RANDOM_SEED = 20_260_101


def rank_baselines(
    region: Region, schedules: Iterable[Schedule], config: EvaluationConfig
) -> BaselineRanking:
    """Measure the region's reference Program under each schedule, eager always among them. Raises
    SandboxError.
    """
    # Eager's outputs are what all others are compared with, and eager is the baseline where nothing
    # else runs.
    pending = [name for name in SCHEDULES if name == EAGER or name in set(schedules)]
    failures: dict[str, str] = {}
    ready_s: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    # A schedule that ended the child is among the failures by then: the others run again in a new
    # child.
    while pending and not samples:
        samples = _benchmark_once(region, pending, config, failures, ready_s)
        pending = [name for name in pending if name not in failures]
    medians = {name: statistics.median(values) for name, values in samples.items()}
    best = choose_baseline(medians) if medians else "eager"
    telemetry.record(
        "judge", "baselines", region.key[:12], best=best, medians_us=medians, failures=failures
    )
    schedule = next(name for name in SCHEDULES if name == best)
    return BaselineRanking(
        Candidate(region.program, schedule, "baseline"), medians, failures, ready_s
    )


def _benchmark_once(
    region: Region,
    schedules: Sequence[Schedule],
    config: EvaluationConfig,
    failures: dict[str, str],
    ready_s: dict[str, float],
) -> dict[str, list[float]]:
    """Benchmark in one child: reasons go into `failures`, the seconds until the others had answered
    once into `ready_s`. Empty when the child was lost, so that the rest can be tried again.
    """
    with acquire(make_limits(config.settings, config.device), config.contract) as child:
        eager = Candidate(region.program, EAGER, "baseline")
        subject = RegionReference(
            region, config.contract, config.device, proven=config.examples is not None
        )
        trial = Trial(
            subject,
            eager,
            config.contract,
            config.device,
            child,
            config.examples,
            reference_cache=config.reference_cache,
            profile=config.profile,
        )
        try:
            # Two sets, so that successive timed calls have different values.
            sets = [trial.draw("normal").name, trial.draw("shifted").name]
        except CandidateFailure as error:
            failures.update(dict.fromkeys(schedules, _summarise_traceback(error.found)))
            return {}
        ready, expected = [], None
        outputs: Outputs | Refusal | None
        for name in schedules:
            # Those of the schedule before are freed before the next ones are computed.
            outputs, started_s = None, working_s()
            outputs = _find_failed_base(name, failures) or _try_schedule(
                trial, name, sets[0], expected
            )
            # Random values can leave eager without a finite number, and then nothing could be
            # compared. The user's own inputs are in the domain.
            if name == EAGER and _has_no_numbers(outputs) and trial.examples is not None:
                sets, outputs = _try_on_examples(trial)
            if isinstance(outputs, Refusal):
                failures[name] = outputs.reason
            else:
                expected = outputs if name == EAGER else expected
                ready.append(name)
                # the first time counts: a second round finds what the first one compiled
                ready_s.setdefault(name, working_s() - started_s)
            # With the child all slots are lost, also those of schedules that work.
            if not child.usable:
                return {}
        # Each process has a caching allocator of its own: memory that this one caches is missing in
        # the child.
        del outputs, expected
        release_cached_memory(config.device)
        # Work of other processes on this GPU would disturb the samples.
        with lock_gpu(config.device, "baselines"):
            return _time_slots(child, ready, sets, failures)


def _try_on_examples(trial: Trial) -> tuple[list[str], Outputs | Refusal]:
    """Eager on the user's own inputs, where it has no finite number on drawn ones: the set, and as
    `_try_schedule`.
    """
    try:
        sets = [trial.draw("examples").name]
    except CandidateFailure as error:
        return [], _refuse_schedule(error)
    return sets, _try_schedule(trial, EAGER, sets[0], None)


def _has_no_numbers(outputs: Outputs | Refusal) -> bool:
    """Whether an output holds no finite number, so that nothing can be compared there."""
    return not isinstance(outputs, Refusal) and any(
        out is not None and not _has_numbers(out) for out in outputs
    )


def _has_numbers(out: torch.Tensor) -> bool:
    return not out.is_floating_point() or not out.numel() or bool(out.isfinite().any())


def _find_failed_base(name: Schedule, failures: dict[str, str]) -> Refusal | None:
    """Why a CUDA graph need not be tried: the schedule that it would capture has failed, and would
    be compiled once more to fail again.
    """
    base = name.base
    if name.cuda_graph and base in failures:
        return Refusal(f"{base} failed: {failures[base]}")
    return None


def _try_schedule(
    trial: Trial, name: Schedule, inputs: str, expected: Outputs | None
) -> Outputs | Refusal:
    """Load the reference under a schedule and call it once: its outputs, or why it is excluded."""
    assert isinstance(trial.candidate, Candidate)  # the reference Program itself
    try:
        trial.load(name, Candidate(trial.candidate.program, name, "baseline"))
        if is_random_program(trial.candidate.program):
            # the same numbers for each schedule, or it is not the same function
            trial.child.call("surroundings", stir=_RANDOM_SEED)
        outputs = trial.call_slot(name, inputs).outputs
    except CandidateFailure as error:
        return _refuse_schedule(error)
    # Only gross differences exclude: Inductor fuses and reorders, so its rounding is not eager's.
    if expected is not None and not all(
        is_grossly_equal(a, b) for a, b in zip(outputs, expected, strict=True)
    ):
        return Refusal(DIFFERS_FROM_EAGER)
    return outputs


def _refuse_schedule(error: CandidateFailure) -> Refusal:
    return Refusal(_summarise_traceback(error.found) or f"{error.stage} failed without a message")


def _time_slots(
    child: Child, ready: Sequence[str], sets: Sequence[str], failures: dict[str, str]
) -> dict[str, list[float]]:
    if not ready:
        return {}
    try:
        answer = child.call("bench", slots=list(ready), sets=list(sets), budget_s=_BUDGET_S)
        return {name: [float(value) for value in answer["samples"][name]] for name in ready}
    except CandidateFailure as error:
        failures[ready[-1]] = (
            # the last one has proven least; the others run again
            f"the benchmark ended: {_summarise_traceback(error.found)}"
        )
        return {}


def _summarise_traceback(text: str) -> str:
    """What failed and why on one line: the first and the last one of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines) if len(lines) < 3 else f"{lines[0]} ... {lines[-1]}"
