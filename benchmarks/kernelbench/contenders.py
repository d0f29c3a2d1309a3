"""The columns that are compared with the baselines: the package, arms of it with techniques left
out, a release's candidates.

The package is used through its public function, `cudal1.accelerate`, with a budget; every swap in
it was judged. A candidate of a release is never run in this process: the package's judge evaluates
it as it evaluates every candidate, in processes of its own.
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
from benchmarks.kernelbench.ablation import make_settings
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

__all__ = ["TunedModule", "judge_candidate", "prestart_judge", "tune_module"]

_MAX_ATTEMPTS, _MAX_REASON_CHARS = 12, 200
_MAX_SHARED_BYTES = 1 << 30
_ATTEMPT_KEYS = (
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
class TunedModule:
    """An accelerated copy of a task's module, and facts about the search (JSON)."""

    call: Call
    facts: Mapping[str, Any]


def prestart_judge(job: Job, cache: Path, tensor_bytes: int) -> int:
    """Start a process of the judge in the background: the search that follows, inside
    `pool_scope()`, need not wait for it.

    `tensor_bytes`: of its device's memory, the tensors of one call. Returns how much of them is
    shared.
    """
    tensor_bytes = min(tensor_bytes, _MAX_SHARED_BYTES)
    settings, device = _make_settings(OURS, job, cache), torch.device(job.device)
    worker_pool.prestart(make_limits(settings, device), contract_for(settings), tensor_bytes)
    return tensor_bytes


def tune_module(
    name: str,
    module: nn.Module,
    inputs: tuple[Any, ...],
    job: Job,
    cache: Path,
    progress: Callable[[str, float | None], None],
) -> TunedModule:
    """Search for this task now, within the budget of the profile, in the present precision. Raises
    what `accelerate` raises.
    """
    accelerated = copy_module(module)
    for layer in accelerated.modules():
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()  # deepcopy loses cuDNN's one-chunk layout
    settings = _make_settings(name, job, cache)
    telemetry.reset()
    begin = time.monotonic()
    cudal1.accelerate(accelerated, inputs, settings=settings, progress=progress)
    tune_s = time.monotonic() - begin
    return TunedModule(accelerated, {"tune_s": round(tune_s, 3), **_describe_search(accelerated)})


def _make_settings(name: str, job: Job, cache: Path) -> Settings:
    return make_settings(
        name,
        Settings(
            on_miss="tune",
            budget_s=job.profile.tune_s,
            cache_dir=cache,
            offline=True,
            shipped=False,
        ),
    )


def judge_candidate(reference: str, candidate: str, job: Job, cache: Path) -> dict[str, Any]:
    """The judge's verdict on a release's candidate: status "ok" (right) or "refused", with the
    paired speed-up and its baseline.
    """
    settings = Settings(cache_dir=cache, offline=True)
    config = SourceEvaluationConfig(
        settings, contract_for(settings), torch.device(job.device), gradients=False
    )
    try:
        with SourceEvaluator(config) as evaluator:
            evaluation = evaluator.evaluate(reference, candidate)
    except SandboxError as error:
        return {"status": "failed", "reason": str(error)[:500]}
    timing = evaluation.timing
    if not evaluation.verdict.passed or timing is None:
        reason = (
            ""
            if isinstance(evaluation.decision, Accepted)
            else f"{evaluation.decision.detector}: {evaluation.decision.reason}"
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
        "error_ratio": evaluation.verdict.worst_error_ratio,
    }


def _describe_search(module: nn.Module) -> dict[str, Any]:
    """What runs, what was tried and why the rest was not chosen; failures of the package that made
    the module's own forward run.
    """
    facts = _collect_search_events(telemetry.report())
    try:
        explanation = cudal1.explain(module)
    except TypeError as error:
        return facts | {
            "swapped": False,
            "runs": [],
            "techniques": [],
            "tried": [],
            "note": str(error),
        }
    regions = explanation.regions
    swapped = [region for region in regions if region.swapped]
    attempts = [_shorten_attempt(attempt) for region in regions for attempt in region.tried]
    undone = [explanation.undone] if explanation.undone else []
    return facts | {
        "swapped": bool(swapped) and not explanation.undone,
        "runs": [region.runs for region in regions],
        "techniques": sorted({technique for region in swapped for technique in region.techniques}),
        "schedules": sorted({region.schedule for region in regions}),
        "tried": attempts[:_MAX_ATTEMPTS],
        "note": "; ".join([*explanation.left_out, *undone, *explanation.gate])[:600],
    }


def _collect_search_events(report: telemetry.Report) -> dict[str, Any]:
    def list_facts(stage: str, event_name: str) -> list[dict[str, Any]]:
        return [
            dict(event.facts)
            for event in report.events
            if (event.stage, event.what) == (stage, event_name)
        ]

    return {
        "counters": dict(report.counters),
        "seconds": list_facts("search", "seconds"),
        "races": list_facts("judge", "baselines"),
        "heats": list_facts("judge", "heat"),
        "validations": list_facts("judge", "validated"),
        "fallbacks": [
            str(event.facts.get("reason", ""))[:300]
            for event in report.events
            if event.what == "fallback"
        ],
    }


def _shorten_attempt(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """An attempted candidate without its evidence, which is in the cache."""
    shown = {
        name: attempt[name] for name in _ATTEMPT_KEYS if attempt.get(name) not in (None, "", [])
    }
    return shown | {"reason": str(attempt.get("reason", ""))[:_MAX_REASON_CHARS]}
