"""What may be tried for a region: its rewritten form, and the groups that kernels may replace."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.entries import add_one_to_output
from tests.search.scripted_judge import CPU, build_space, capture_region
from tests.search.scripted_kernels import (
    PROPOSED,
    make_attempt,
    make_job,
    patch_search,
    propose_all,
)
from torch_cudal1 import judge, kernels
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.fusion.partition import partition
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import (
    Candidate,
)
from torch_cudal1.kernels import Proposal
from torch_cudal1.search.new_entry import store_checked_kernel
from torch_cudal1.search.operator_timing import OperatorChoice
from torch_cudal1.search.space import build_search_space, list_fusion_groups
from torch_cudal1.search.strategy import StagedSearch
from torch_cudal1.store.context import TuneContext


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t().t() * 1.0 * 2.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneContext:
    return patch_search(tmp_path, monkeypatch)


@pytest.mark.parametrize("best_us", [None, 30.0])
def test_every_fusion_group_that_a_search_asks_kernels_for_is_known_ahead(
    place: TuneContext, monkeypatch: pytest.MonkeyPatch, best_us: float | None
) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(2048, 2048), nn.LayerNorm(2048)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.triu(self.norm(torch.tanh(self.first(x))) @ x)

    with torch.no_grad():
        (region,) = capture_regions(Mixed().eval(), (torch.randn(2048, 2048),))
    proposed_for: set[str] = set()

    def propose(program: Program, sm: int, rights: Sequence[str]) -> tuple[Proposal, ...]:
        proposed_for.add(program.digest)
        return PROPOSED[:1]

    monkeypatch.setattr(kernels, "propose", propose)
    there = replace(place, device=torch.device("cuda"))
    space = build_search_space(
        region, there, make_job(place), functools.partial(store_checked_kernel, there)
    )
    ranking = judge.BaselineRanking(
        Candidate(region.program, "eager", "baseline"), {"eager": 100.0}
    )
    strategy = StagedSearch(space, ranking, float("inf"))
    if best_us is not None:
        strategy.observe(make_attempt(ranking.best, best_us, 1.3))
    assert list(propose_all(strategy))
    assert proposed_for <= {group.region.program.digest for group in list_fusion_groups(region)}


class Upper(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.triu(a @ b)


def test_a_product_that_a_rewrite_cuts_in_panels_is_offered_to_kernels_in_one_piece(
    place: TuneContext,
) -> None:
    with torch.no_grad():
        (region,) = capture_regions(Upper(), (torch.randn(1024, 1024), torch.randn(1024, 1024)))
    space = build_search_space(
        region,
        replace(place, device=torch.device("cuda")),
        make_job(place),
        lambda *arguments: None,
    )
    assert space.variant is not None
    assert space.variant.techniques == ("triangular_matmul",)
    assert len(space.dominant_groups) == 1
    assert len(partition(replace(region, program=space.variant.program), products=True).groups) > 1


@pytest.mark.parametrize(("without", "proposed"), [((), True), (("kernels",), False)])
def test_kernels_left_out_are_not_proposed(without, proposed, on_gpu):
    region = capture_region(nn.Sequential(nn.Tanh(), nn.LayerNorm(16)), torch.randn(4, 16))
    place, built = on_gpu
    there = replace(
        place, device=torch.device("cuda"), settings=place.settings.but(without=without)
    )
    ranking = judge.BaselineRanking(Candidate(region.program, "eager", "baseline"), {"eager": 1.0})
    space = build_space(region, there, judge.EvaluationConfig(there.settings, there.contract, CPU))
    first = StagedSearch(space, ranking, float("inf")).propose()
    assert (first is not None, bool(built)) == (proposed, proposed)


def test_operators_that_were_measured_to_be_faster_are_in_the_form_that_is_tried(
    place: TuneContext,
) -> None:
    job = make_job(place)
    store = functools.partial(store_checked_kernel, place)
    # Nothing to rewrite, and then something.
    for module in (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Identity(), Twice())):
        region = capture_region(module, torch.randn(3, 4))
        plain = build_search_space(region, place, job, store)
        program = add_one_to_output(region.program)
        operators = OperatorChoice(program, ("convolution as product",))
        space = build_search_space(region, place, job, store, operators)
        assert space.variant is not None
        assert space.has_paying_rewrite
        names = plain.variant.techniques if plain.variant is not None else ()
        assert space.variant.techniques == ("convolution as product", *names)
        assert space.region.program == region.program
        inputs = [torch.randn(spec.shape) for spec in region.program.inputs]
        changed, own = (
            interpret(each, CPU)(inputs)[0] for each in (space.variant.program, region.program)
        )
        torch.testing.assert_close(changed, own + 1)
