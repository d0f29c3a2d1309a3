"""`cudal1 warmup`: fills the cache for targets ahead of time, so that a process on a warm cache
neither searches nor compiles.

One target after the other; the judge's children do the work. A target that fails is a result with
its error, and the rest go on. `fleet` does the same with many workers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_cudal1.api.accelerate import (
    accelerate,
    explain,
    is_on_trial,
    restore,
    split_example_inputs,
)
from torch_cudal1.api.gradients.training_step import compute_gradients
from torch_cudal1.api.recording.replay import (
    RecordedCall,
    enter_recorded_modes,
    list_recorded_calls,
    read_recording,
)
from torch_cudal1.api.targets import LoadedTarget, load, try_call
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.core.report import Explanation
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.module_call import list_call_tensors
from torch_cudal1.search.tune import Progress

__all__ = ["WarmupResult", "warm", "warmup"]


@dataclass(frozen=True)
class WarmupResult:
    """The outcome for one target: its explanation, or why it failed.

    `built`: candidates validated. `reused`: decisions that were found in a cache.
    """

    target: str
    explanation: Explanation | None
    error: str | None
    seconds: float
    built: int
    reused: int


def warmup(
    targets: str | Sequence[str],
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
    training: bool = False,
    device: str | None = None,
    recording: Path | str | None = None,
) -> tuple[WarmupResult, ...]:
    """Tune each target (see `torch_cudal1.api.targets`) on `device` (default: where its module is),
    and store the decisions.

    Modules are tuned as they are returned, train or eval; under no_grad unless `training`. With
    `recording`, a file of `record`, not the target's own inputs are tuned for but each recorded
    form of its calls, the most frequent first, in the recorded modes. Raises TargetError for a
    target that cannot be loaded or called, and for a recording without a call of it; what fails
    later, and what could not be stored, is the error of its result.
    """
    # A warm-up's own calls must not enter a recording of production.
    chosen = (settings or Settings.from_env()).but(on_miss="tune", record=None)
    read_back = None if recording is None else read_recording(recording)
    results = []
    for target in [targets] if isinstance(targets, str) else targets:
        for loaded in load(target, device=device):
            # Inputs that do not fit are the target's fault, and should not be reported as a failed
            # capture.
            try_call(loaded)
            if read_back is None:
                results.append(warm(loaded, chosen, progress=progress, training=training))
                continue
            for call in list_recorded_calls(loaded, read_back):
                results.append(_warm_recorded(call, chosen, progress))
    return tuple(results)


def _warm_recorded(
    call: RecordedCall, settings: Settings, progress: Progress | None
) -> WarmupResult:
    if call.problem:
        return WarmupResult(call.loaded.name, None, call.problem, 0.0, 0, 0)
    with enter_recorded_modes(call):
        return warm(call.loaded, settings, progress=progress, training=call.mode.grad)


def warm(
    loaded: LoadedTarget,
    settings: Settings,
    *,
    progress: Progress | None = None,
    training: bool = False,
) -> WarmupResult:
    """Tune one loaded target under `settings` as they are; a failure of this package is the
    error of the result.
    """
    module, counters_before, started, started_at = (
        loaded.module,
        telemetry.report().counters,
        time.monotonic(),
        time.time(),
    )
    explanation, error = None, None
    try:
        with torch.set_grad_enabled(training):
            accelerate(module, loaded.inputs, settings=settings, progress=progress)
            _finish_trial(loaded)
        # Before `restore`, which forgets what was bound.
        explanation = explain(module)
        restore(module)
        # `accelerate` falls back instead of raising, but the user of a warm-up must see what
        # failed.
        error = _find_problem_since(started_at)
    except (Cudal1Error, RuntimeError, ValueError, TypeError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    counters = telemetry.report().counters

    def count_since(counter: str) -> int:
        return counters.get(counter, 0) - counters_before.get(counter, 0)

    return WarmupResult(
        loaded.name,
        explanation,
        error,
        time.monotonic() - started,
        count_since("candidates_judged"),
        count_since("entries_reused"),
    )


def _finish_trial(loaded: LoadedTarget) -> None:
    """Make the calls, or training steps, that decide about a forward in several graphs: during a
    warm-up no other caller makes any.
    """
    args, kwargs = split_example_inputs(loaded.inputs)
    tensors = [*loaded.module.parameters(), *list_call_tensors(args, kwargs)]
    leaves = [tensor for tensor in tensors if tensor.requires_grad and torch.is_grad_enabled()]
    # The loop ends: a trial has at most `pieces.MAX_TRIAL_STEPS` steps.
    while is_on_trial(loaded.module):
        results = loaded.module(*args, **kwargs)
        if leaves:
            # Not `backward`: the leaves' `.grad` stay as they are.
            compute_gradients(results, leaves)


def _find_problem_since(started_at: float) -> str | None:
    """What `accelerate` survived but a warm-up must report: a failure of this package, or a decision
    that the cache did not store.
    """
    for event in telemetry.report().events:
        if event.at >= started_at and event.what == "fallback":
            return str(event.facts.get("reason"))
        if event.at >= started_at and event.what == "not_stored":
            return f"decided, but not stored: {event.facts.get('reason')}"
    return None
