"""The columns that are compared with the baselines: the package, arms of it with techniques left
out, a release's candidates.

The package is asked through its public door, `cudal1.accelerate`, with a budget; every swap in it
was judged. A candidate of a release is never run here: the package's judge says of it what it says
of everybody's, in processes of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cudal1
from benchmarks.kernelbench.ablation import settings_of
from benchmarks.kernelbench.baselines import Call
from benchmarks.kernelbench.job import OURS, Job
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import contract_for
from torch_cudal1.graph.functional_module import copy_module
from torch_cudal1.ir.records import Accepted
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator
from torch_cudal1.judge.sandbox import worker_pool
from torch_cudal1.judge.sandbox.child import make_limits

__all__ = ["Tuned", "begin", "judged", "tuned"]

_TRIED_KEPT, _REASON_KEPT = 12, 200
_MOST_SHARED_BYTES = 1 << 30
_OF_TRIED = (
    "label",
    "techniques",
    "schedule",
    "decision",
    "detector",
    "speedup",
    "low",
    "error_ratio",
)


@dataclass(frozen=True)
class Tuned:
    """An accelerated copy of a task's module, and what is known about the search (JSON)."""

    call: Call
    facts: Mapping[str, Any]


def begin(job: Job, cache: Path, shared_bytes: int) -> int:
    """Start a process of the judge in the background: the search that follows, inside
    `pool_scope()`, need not wait for it.

    `shared_bytes`: of its device's memory, the tensors of one call. Returns how much of them is
    shared.
    """
    shared_bytes = min(shared_bytes, _MOST_SHARED_BYTES)
    settings, device = _settings(OURS, job, cache), torch.device(job.device)
    worker_pool.prestart(make_limits(settings, device), contract_for(settings), shared_bytes)
    return shared_bytes


def tuned(
    name: str,
    module: nn.Module,
    inputs: tuple[Any, ...],
    job: Job,
    cache: Path,
    say: Callable[[str, float | None], None],
) -> Tuned:
    """Search for this task now, within the profile's budget, in the present precision. Raises what
    `accelerate` raises.
    """
    own = copy_module(module)
    for layer in own.modules():
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()  # deepcopy loses cuDNN's one-chunk layout
    settings = _settings(name, job, cache)
    telemetry.reset()
    begin = time.monotonic()
    cudal1.accelerate(own, inputs, settings=settings, progress=say)
    tune_s = time.monotonic() - begin
    return Tuned(own, {"tune_s": round(tune_s, 3), **_told(own)})


def _settings(name: str, job: Job, cache: Path) -> Settings:
    return settings_of(
        name,
        Settings(
            on_miss="tune",
            budget_s=job.profile.tune_s,
            cache_dir=cache,
            offline=True,
            shipped=False,
        ),
    )


def judged(reference: str, candidate: str, job: Job, cache: Path) -> dict[str, Any]:
    """What the judge says of a release's candidate: status "ok" (right) or "refused", with its
    paired speed-up and over what.
    """
    settings = Settings(cache_dir=cache, offline=True)
    asked = SourceEvaluationConfig(
        settings, contract_for(settings), torch.device(job.device), gradients=False
    )
    try:
        with SourceEvaluator(asked) as evaluator:
            found = evaluator.evaluate(reference, candidate)
    except SandboxError as error:
        return {"status": "failed", "reason": str(error)[:500]}
    timing = found.timing
    if not found.verdict.passed or timing is None:
        reason = (
            ""
            if isinstance(found.decision, Accepted)
            else f"{found.decision.detector}: {found.decision.reason}"
        )
        return {"status": "refused", "reason": reason[:500]}
    over = {"eager": "eager", "inductor": "torch.compile", "inductor+graph": "reduce-overhead"}[
        timing.baseline
    ]
    paired = {"over": over, "speedup": timing.speedup, "low": timing.low, "high": timing.high}
    return {
        "status": "ok",
        "reason": "",
        "paired": paired,
        "error_ratio": found.verdict.worst_error_ratio,
    }


def _told(module: nn.Module) -> dict[str, Any]:
    """What runs, what was tried and why not the rest; failures of ours that made the module's own
    forward run.
    """
    seen = telemetry.report()
    facts: dict[str, Any] = {
        "counters": dict(seen.counters),
        "seconds": [
            dict(event.facts)
            for event in seen.events
            if (event.stage, event.what) == ("search", "seconds")
        ],
        "races": [
            dict(event.facts)
            for event in seen.events
            if (event.stage, event.what) == ("judge", "baselines")
        ],
        "heats": [
            dict(event.facts)
            for event in seen.events
            if (event.stage, event.what) == ("judge", "heat")
        ],
        "validations": [
            dict(event.facts)
            for event in seen.events
            if (event.stage, event.what) == ("judge", "validated")
        ],
        "fallbacks": [
            str(event.facts.get("reason", ""))[:300]
            for event in seen.events
            if event.what == "fallback"
        ],
    }
    try:
        story = cudal1.explain(module)
    except TypeError as error:
        return facts | {
            "swapped": False,
            "runs": [],
            "techniques": [],
            "tried": [],
            "note": str(error),
        }
    swapped = [region for region in story.regions if region.swapped]
    tried = [_brief(one) for region in story.regions for one in region.tried][:_TRIED_KEPT]
    return facts | {
        "swapped": bool(swapped) and not story.undone,
        "runs": [region.runs for region in story.regions],
        "techniques": sorted({technique for region in swapped for technique in region.techniques}),
        "schedules": sorted({region.schedule for region in story.regions}),
        "tried": tried,
        "note": "; ".join(
            [*story.left_out, *([story.undone] if story.undone else []), *story.gate]
        )[:600],
    }


def _brief(one: Mapping[str, Any]) -> dict[str, Any]:
    """A candidate's fate without its evidence, which is in the cache."""
    kept = {name: one[name] for name in _OF_TRIED if one.get(name) not in (None, "", [])}
    return kept | {"reason": str(one.get("reason", ""))[:_REASON_KEPT]}
