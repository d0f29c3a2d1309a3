"""Test helper: a search for kernels whose compiler, prescreen and checks answer at once, by the
proposal's name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_cudal1 import judge, kernels
from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.fusion.partition import FusionGroup, partition
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import (
    Accepted,
    Candidate,
    CheckResult,
    Region,
    Rejected,
    Target,
    Timing,
    Verdict,
)
from torch_cudal1.judge.evaluate.prescreen import PrescreenResult
from torch_cudal1.kernels import Proposal
from torch_cudal1.search import group_kernels, shortlist
from torch_cudal1.search.group_kernels import GroupKernels
from torch_cudal1.search.new_entry import store_checked_kernel
from torch_cudal1.search.strategy import Attempt, SearchStrategy
from torch_cudal1.store.context import TuneContext, make_context

PROPOSED = tuple(
    Proposal("gemm", {"name": name}) for name in ("first", "best", "wrong", "broken", "slow")
)


PASSED = Verdict((CheckResult("numerics", True, 1.0, 2.0),))


TIMES_US: dict[str, float | str] = {
    "first": 80.0,
    "best": 40.0,
    "wrong": 30.0,
    "broken": "does not load",
    "slow": 110.0,
}


def prescreen_by_name(
    region: Region,
    candidates: Sequence[Candidate],
    job: judge.EvaluationConfig,
    eager: Program,
) -> PrescreenResult:
    times = {at: TIMES_US[candidate.techniques[1]] for at, candidate in enumerate(candidates)}
    measured = {at: result for at, result in times.items() if isinstance(result, float)}
    return PrescreenResult(
        100.0, measured, {at: result for at, result in times.items() if isinstance(result, str)}
    )


def validate_by_name(region: Region, candidate: Candidate, job: judge.EvaluationConfig) -> Verdict:
    assert job.examples is None, "the whole model's inputs are not the fusion group's"
    wrong = candidate.techniques[1] == "wrong"
    return (
        Verdict((CheckResult("numerics", False, detail="an error of 9x eager's"),))
        if wrong
        else PASSED
    )


def build_by_name(
    region: Region, proposals: Sequence[Proposal], *how: judge.EvaluationConfig | Target
) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(region.program, "eager", "kernels", ("gemm", str(p.config["name"])))
        for p in proposals
    )


def patch_search(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> TuneContext:
    """A place with this cache that looks like a GPU, where searches for kernels are scripted."""
    telemetry.reset()
    monkeypatch.setattr(kernels, "propose", lambda program, sm, rights: PROPOSED)
    monkeypatch.setattr(group_kernels, "PROPOSALS_PER_GROUP", len(PROPOSED))
    monkeypatch.setattr(judge, "build_candidates", build_by_name)
    monkeypatch.setattr(judge, "prestart_worker", lambda region, job: None)
    monkeypatch.setattr(shortlist, "prescreen", prescreen_by_name)
    monkeypatch.setattr(judge, "validate_candidate", validate_by_name)
    here = make_context(torch.device("cpu"), Settings(cache_dir=cache_dir, on_miss="tune"))
    return replace(here, target=Target("cuda", "sm_90", "some GPU", "580", torch.__version__, ""))


def capture_linear() -> Region:
    with torch.no_grad():
        (region,) = capture_regions(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval(), (torch.randn(4, 8),)
        )
    return region


def make_job(place: TuneContext) -> judge.EvaluationConfig:
    return judge.EvaluationConfig(
        place.settings, place.contract, torch.device("cpu"), (torch.randn(4, 8),)
    )


def make_group_kernels(place: TuneContext, deadline: float = float("inf")) -> GroupKernels:
    return GroupKernels(
        place, make_job(place), functools.partial(store_checked_kernel, place), deadline
    )


def partition_products(region: Region) -> tuple[FusionGroup, ...]:
    return partition(region, products=True).groups


def complete_future(answer: tuple[Candidate, ...]) -> Future[tuple[Candidate, ...]]:
    future: Future[tuple[Candidate, ...]] = Future()
    future.set_result(answer)
    return future


def propose_all(strategy: SearchStrategy) -> Iterator[Candidate | Rejected]:
    """Every proposal of a strategy, in order."""
    while (proposal := strategy.propose()) is not None:
        yield proposal


def make_attempt(candidate: Candidate, best_us: float | None, speedup: float) -> Attempt:
    """An attempt that was accepted at `best_us`, or timed and rejected."""
    passed = Verdict((CheckResult("numerics", True, 1.0, 2.0),))
    timing = Timing(passed, "eager", best_us or 100.0, 100.0, speedup, speedup, speedup, 14)
    decision = (
        Rejected("not faster", "timing", timing=timing) if best_us is None else Accepted(timing)
    )
    return Attempt(judge.Evaluation(candidate, decision, passed))
