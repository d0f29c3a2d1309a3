"""Among a product's kernels the fastest right one is taken; what was not asked for lack of time is not remembered as useless."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_cudal1 import judge, observe, pipeline
from torch_cudal1.binding import captured_regions
from torch_cudal1.graph.partition import partition
from torch_cudal1.island_race import fastest_right, rights_of
from torch_cudal1.kernels import Proposal
from torch_cudal1.place import Place, place_for
from torch_cudal1.records import Accepted, Candidate, Check, Contract, Region, Rejected, Target, Timing, Verdict
from torch_cudal1.settings import Settings

PASSED = Verdict((Check("numerics", True, 1.0, 2.0),))
SPEEDS: dict[str, float | str] = {"first": 1.2, "best": 3.0, "wrong": "an error of 9x eager's", "last": 2.0}


def judged(region: Region, candidate: Candidate, ranking: judge.Ranking, job: judge.Job) -> judge.Judgement:
    assert job.examples is None, "the whole model's inputs are not the island's"
    said = SPEEDS[candidate.techniques[1]]
    if isinstance(said, str):
        return judge.Judgement(candidate, Rejected(said, "numerics"), PASSED)
    timing = Timing(PASSED, "eager", 100 / said, 100.0, said, said, said, 14)
    return judge.Judgement(candidate, Accepted(timing), PASSED)


def built(region: Region, proposals: list[Proposal], job: judge.Job, target: Target) -> tuple[Candidate, ...]:
    return tuple(Candidate(region.program, "eager", "kernels", ("gemm", str(p.config["name"]))) for p in proposals)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    observe.reset()
    proposals = tuple(Proposal("gemm", {"name": name}) for name in SPEEDS)
    monkeypatch.setattr(pipeline.kernels, "propose", lambda program, sm, rights: proposals)
    monkeypatch.setattr(judge, "build", built)
    monkeypatch.setattr(judge, "judge", judged)
    monkeypatch.setattr(
        judge, "rank_baselines", lambda region, schedules, job: judge.Ranking(Candidate(region.program, "eager", "baseline"), {})
    )
    here = place_for(torch.device("cpu"), Settings(cache_dir=tmp_path, on_miss="tune"))
    return replace(here, target=Target("cuda", "sm_90", "some GPU", "580", torch.__version__, ""))


@pytest.fixture
def whole() -> Region:
    with torch.no_grad():
        (region,) = captured_regions(nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval(), (torch.randn(4, 8),))
    return region


def job_at(place: Place) -> judge.Job:
    return judge.Job(place.settings, place.contract, torch.device("cpu"), (torch.randn(4, 8),))


def test_the_fastest_right_kernel_is_taken_and_the_wrong_one_is_told(place: Place, whole: Region) -> None:
    proposals = [Proposal("gemm", {"name": name}) for name in SPEEDS]
    best, reasons = fastest_right(whole, proposals, place, job_at(place), deadline=float("inf"))
    assert best is not None
    assert best.techniques == ("gemm", "best")
    assert [reason.reason for reason in reasons] == ["an error of 9x eager's"]


def test_an_island_around_a_product_gets_the_fastest_kernel_and_is_asked_once(place: Place, whole: Region) -> None:
    for _ in range(2):
        found, _ = pipeline._island_kernels(whole, place, job_at(place), deadline=float("inf"), products=True)
        assert [techniques for _, techniques in found.values()] == [("gemm", "best")]
    assert observe.report().counters["entries_reused"] == 1
    assert len(partition(whole).islands) == 0  # without products there is nothing to fuse


def test_a_search_out_of_time_remembers_nothing(place: Place, whole: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic()
    monkeypatch.setattr(
        judge, "build", lambda *given: (monkeypatch.setattr(time, "monotonic", lambda: begin + 9e9), built(*given))[1]
    )
    found, reasons = pipeline._island_kernels(whole, place, job_at(place), deadline=begin + 1e9, products=True)
    assert found == {}
    assert {reason.detector for reason in reasons} == {"budget"}
    monkeypatch.setattr(time, "monotonic", lambda: begin)
    monkeypatch.setattr(judge, "build", built)
    assert pipeline._island_kernels(whole, place, job_at(place), deadline=float("inf"), products=True)[0]


def test_strict_precision_grants_no_tf32_even_where_the_user_does(place: Place) -> None:
    granted = replace(place, contract=Contract(rights=("matmul",)))
    assert rights_of(granted) == ("matmul",)
    assert rights_of(replace(place, contract=Contract("strict", rights=("matmul",)))) == ()
