"""Fixtures of a search with a scripted judge."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.search.scripted_judge import CPU, Reduced, ScriptedJudge, capture_region
from tests.search.scripted_kernels import PASSED
from torch_cudal1 import judge, kernels
from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import (
    Candidate,
    Region,
    Target,
)
from torch_cudal1.kernels import Proposal
from torch_cudal1.store.context import TuneContext, make_context


@pytest.fixture
def region() -> Region:
    return capture_region(Reduced(), torch.randn(256, 64))


@pytest.fixture
def place(tmp_path: Path) -> TuneContext:
    telemetry.reset()
    return make_context(CPU, Settings(cache_dir=tmp_path, on_miss="tune"))


@pytest.fixture
def script_judge(monkeypatch: pytest.MonkeyPatch):
    """Replaces the judge by one that gives these verdicts, by schedule."""

    def replace_judge(verdicts: dict[str, float | str]) -> ScriptedJudge:
        scripted = ScriptedJudge(verdicts)
        monkeypatch.setattr(judge, "rank_baselines", scripted.rank_baselines)
        monkeypatch.setattr(judge, "evaluate_candidate", scripted.evaluate_candidate)
        return scripted

    return replace_judge


@pytest.fixture
def on_gpu(place, monkeypatch):
    """A place that looks like a GPU, whose build yields each fusion group's own steps as the "kernel"."""
    built: list[str] = []

    def build(region, proposals, job, target):
        built.append(region.key)
        return tuple(
            Candidate(region.program, "eager", "kernels", (proposal.family,))
            for proposal in proposals
        )

    monkeypatch.setattr(
        kernels, "propose", lambda program, sm, rights: (Proposal("elementwise", {"tile": 1}),)
    )
    monkeypatch.setattr(judge, "build_candidates", build)
    monkeypatch.setattr(judge, "validate_candidate", lambda region, candidate, job: PASSED)
    target = Target("cuda", "sm_90", "some GPU", "580", torch.__version__, "")
    return replace(place, target=target), built
