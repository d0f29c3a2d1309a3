"""The order of candidates follows from what became of those before."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.search.scripted_kernels import (
    make_attempt,
    make_job,
    patch_search,
    propose_all,
)
from torch_cudal1 import judge, kernels
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.fusion.fusible_ops import is_product
from torch_cudal1.graph.propose import Variant
from torch_cudal1.ir.program import Call, Program
from torch_cudal1.ir.records import (
    Candidate,
)
from torch_cudal1.judge.evaluate.prescreen import PrescreenResult
from torch_cudal1.kernels import Proposal
from torch_cudal1.search import shortlist
from torch_cudal1.search.new_entry import store_checked_kernel
from torch_cudal1.search.space import SearchSpace, build_search_space
from torch_cudal1.search.strategy import StagedSearch
from torch_cudal1.store.context import TuneContext


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneContext:
    return patch_search(tmp_path, monkeypatch)


def test_where_products_are_most_of_the_work_they_are_judged_first(place: TuneContext) -> None:
    with torch.no_grad():
        (region,) = capture_regions(
            nn.Sequential(nn.Linear(2048, 2048), nn.GELU()).eval(), (torch.randn(4096, 2048),)
        )
    there = replace(place, device=torch.device("cuda"))
    ranking = judge.BaselineRanking(
        Candidate(region.program, "eager", "baseline"), {"eager": 100.0}
    )
    space = build_search_space(
        region, there, make_job(place), functools.partial(store_checked_kernel, there)
    )
    proposals = list(propose_all(StagedSearch(space, ranking, float("inf"))))
    first = next(candidate for candidate in proposals if isinstance(candidate, Candidate))
    assert first.techniques == ("gemm", "wrong")  # unchecked: the judge of the whole will say so


@pytest.fixture
def norm_space(
    place: TuneContext, monkeypatch: pytest.MonkeyPatch
) -> tuple[SearchSpace, judge.BaselineRanking]:
    """A product and a norm, with one kernel for each."""
    with torch.no_grad():
        layers = nn.Sequential(nn.Linear(2048, 2048), nn.LayerNorm(2048)).eval()
        (region,) = capture_regions(layers, (torch.randn(4096, 2048),))
    family = {True: Proposal("gemm", {"name": "best"}), False: Proposal("norm", {"name": "norm"})}
    monkeypatch.setattr(
        kernels,
        "propose",
        lambda program, sm, rights: (family[any(is_product(step) for step in program.steps)],),
    )
    monkeypatch.setattr(
        judge,
        "build_candidates",
        lambda region, proposals, *how: tuple(
            Candidate(region.program, "eager", "kernels", (p.family, "any")) for p in proposals
        ),
    )
    monkeypatch.setattr(
        shortlist,
        "prescreen",
        lambda region, candidates, job, eager: PrescreenResult(100.0, {0: 40.0}, {}),
    )
    there = replace(place, device=torch.device("cuda"))
    space = build_search_space(
        region, there, make_job(place), functools.partial(store_checked_kernel, there)
    )
    ranking = judge.BaselineRanking(
        Candidate(region.program, "eager", "baseline"), {"eager": 100.0}
    )
    return space, ranking


@pytest.mark.parametrize(
    ("best_us", "gain", "more"),
    [
        (None, 0.9, [{"norm"}]),
        (30.0, 1.3, [{"gemm", "norm"}]),
        (None, 1.03, [{"gemm", "norm"}, {"norm"}]),
    ],
)
def test_what_follows_the_products_depends_on_whether_they_won(
    norm_space: tuple[SearchSpace, judge.BaselineRanking],
    best_us: float | None,
    gain: float,
    more: list[set[str]],
) -> None:
    """They lost: the rest is tried without them. They won: with them. They gained too little by
    themselves: both.
    """
    assert list_techniques(*norm_space, best_us, gain) == [{"gemm"}, *more]


@pytest.mark.parametrize(
    ("best_us", "expected"),
    [
        (30.0, [{"gemm"}, {"gemm", "norm"}]),
        (None, [{"gemm"}, {"rewritten"}, {"gemm", "norm"}, {"norm"}]),
    ],
)
def test_where_kernels_won_the_form_without_them_takes_no_time(
    norm_space: tuple[SearchSpace, judge.BaselineRanking],
    best_us: float | None,
    expected: list[set[str]],
) -> None:
    space, ranking = norm_space
    rewritten = Variant(space.region.program, ("rewritten",), gain=2.0)
    names = list_techniques(replace(space, variant=rewritten), ranking, best_us, 1.03)
    kernels_only = [each - {"rewritten"} or each for each in names]
    assert kernels_only == expected


def list_techniques(
    space: SearchSpace, ranking: judge.BaselineRanking, best_us: float | None, gain: float
) -> list[set[str]]:
    """Of the candidates in their order, each of which was measured so."""
    techniques = []
    strategy = StagedSearch(space, ranking, float("inf"))
    for candidate in propose_all(strategy):
        assert isinstance(candidate, Candidate)
        techniques.append(set(candidate.techniques) & {"gemm", "norm", "rewritten"})
        strategy.observe(make_attempt(candidate, best_us, gain))
    return techniques


@pytest.mark.parametrize(
    ("takes_us", "techniques"), [(40.0, [{"gemm"}, {"norm"}]), (99.0, [{"gemm", "norm"}, {"norm"}])]
)
def test_kernels_for_products_come_first_where_they_save_much_though_other_steps_dominate(
    place: TuneContext, monkeypatch: pytest.MonkeyPatch, takes_us: float, techniques: list[set[str]]
) -> None:
    """Inductor fuses the rest better than kernels beside it; and nothing of the rest is tried with
    products that lost.
    """
    with torch.no_grad():
        layers = nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 2)).eval()
        (region,) = capture_regions(layers, (torch.randn(512, 1024),))
    monkeypatch.setattr(
        kernels,
        "propose",
        lambda program, sm, rights: (
            Proposal("gemm" if any(map(is_product, program.steps)) else "norm", {"name": "any"}),
        ),
    )
    monkeypatch.setattr(
        judge,
        "build_candidates",
        lambda region, proposals, *how: tuple(
            Candidate(region.program, "eager", "kernels", (p.family, "any")) for p in proposals
        ),
    )
    monkeypatch.setattr(
        shortlist,
        "prescreen",
        lambda region, candidates, job, eager: PrescreenResult(100.0, {0: takes_us}, {}),
    )
    there = replace(place, device=torch.device("cuda"))
    space = build_search_space(
        region, there, make_job(place), functools.partial(store_checked_kernel, there)
    )
    assert (space.dominant_groups, len(space.minor_groups)) == ((), 1)
    ranking = judge.BaselineRanking(
        Candidate(region.program, "eager", "baseline"), {"eager": 100.0}
    )
    candidates = (
        candidate
        for candidate in propose_all(StagedSearch(space, ranking, float("inf")))
        if isinstance(candidate, Candidate)
    )
    assert [set(candidate.techniques) & {"gemm", "norm"} for candidate in candidates] == techniques


class Projections(nn.Module):
    """Query and key of attention, both of one operand, in a half type."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(2048, 2048), nn.Linear(2048, 2048)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(self.query(x)), torch.relu(self.key(x))


@pytest.mark.parametrize(
    ("has_shared_kernel", "kernels_of_candidates"),
    # one launch for both, then a launch each; or at once a launch each, where none serves both
    [(True, [["sibling_gemm"], ["gemm", "gemm"]]), (False, [["gemm", "gemm"]])],
)
def test_products_of_one_operand_are_tried_in_one_launch_first(
    place: TuneContext,
    monkeypatch: pytest.MonkeyPatch,
    has_shared_kernel: bool,
    kernels_of_candidates: list[list[str]],
) -> None:
    with torch.no_grad():
        x = torch.randn(4096, 2048).bfloat16()
        (region,) = capture_regions(Projections().bfloat16().eval(), (x,))

    def propose(program: Program, sm: int, rights: object) -> tuple[Proposal, ...]:
        count = sum(map(is_product, program.steps))
        if count == 2 and not has_shared_kernel:
            return ()
        return (Proposal({1: "gemm", 2: "sibling_gemm"}[count], {"name": "any"}),)

    monkeypatch.setattr(kernels, "propose", propose)
    monkeypatch.setattr(
        judge,
        "build_candidates",
        lambda region, proposals, *how: tuple(
            Candidate(region.program, "eager", "kernels", (p.family, "any")) for p in proposals
        ),
    )
    monkeypatch.setattr(
        shortlist,
        "prescreen",
        lambda region, candidates, job, eager: PrescreenResult(100.0, {0: 40.0}, {}),
    )
    there = replace(place, device=torch.device("cuda"))
    space = build_search_space(
        region, there, make_job(place), functools.partial(store_checked_kernel, there)
    )
    ranking = judge.BaselineRanking(
        Candidate(region.program, "eager", "baseline"), {"eager": 1000.0}
    )
    strategy = StagedSearch(space, ranking, float("inf"))
    names: dict[tuple[str, ...], list[str]] = {}
    for candidate in propose_all(strategy):
        assert isinstance(candidate, Candidate)
        families = [name for name in candidate.techniques if name.endswith("gemm")]
        calls = sum(isinstance(step, Call) for step in candidate.program.steps)
        names.setdefault(tuple(families), families * calls)
        strategy.observe(make_attempt(candidate, 30.0, 1.3))
    assert list(names.values()) == kernels_of_candidates
