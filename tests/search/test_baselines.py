"""Which baselines the settings allow, and which of them are worth a benchmark."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ir.stacks import ROWS, WIDTH, capture_region, make_stack
from tests.search.scripted_judge import CPU
from torch_cudal1 import judge
from torch_cudal1.ir.records import (
    Candidate,
)
from torch_cudal1.ir.schedule import Schedule
from torch_cudal1.search import baselines, quick
from torch_cudal1.search.baselines import list_baseline_schedules, rank_schedules


@pytest.mark.parametrize(("floor_us", "benchmarked"), [(0.0, 4), (400.0, 4), (100_000.0, 2)])
def test_graphs_are_benchmarked_only_where_launching_can_matter(
    region, place, monkeypatch, floor_us, benchmarked
):
    """Where results are gigabytes a graph saves nothing, and holds its inputs and results a second
    time.
    """
    schedules_ranked: list[str] = []

    def rank_baselines(region, schedules, job):
        schedules_ranked.extend(schedules)
        return judge.BaselineRanking(
            Candidate(region.program, "eager", "baseline"), {"eager": 100.0}, {}
        )

    monkeypatch.setattr(judge, "rank_baselines", rank_baselines)
    monkeypatch.setattr(
        baselines,
        "list_baseline_schedules",
        lambda region, place: [
            Schedule(base, cuda_graph)
            for cuda_graph in (False, True)
            for base in ("eager", "inductor")
        ],
    )
    ranking = rank_schedules(
        region, place, judge.EvaluationConfig(place.settings, place.contract, CPU), 15.0, floor_us
    )
    assert len(schedules_ranked) == benchmarked
    assert set(ranking.failures) == (
        {"eager+graph", "inductor+graph"} if benchmarked == 2 else set()
    )
    assert all("launches" in why for why in ranking.failures.values())


@pytest.mark.parametrize(
    ("settings", "joins"), [({}, False), ({"autotune": True}, True), ({"budget_s": 900.0}, True)]
)
def test_max_autotune_joins_when_asked_or_when_the_budget_allows(settings, joins, region, place):
    schedules = list_baseline_schedules(
        region, replace(place, settings=place.settings.but(**settings))
    )
    assert ("max-autotune" in schedules) == joins


@pytest.mark.parametrize(
    ("without", "remaining"),
    [
        (
            (),
            {
                "eager",
                "inductor",
                "max-autotune",
                "eager+graph",
                "inductor+graph",
                "max-autotune+graph",
            },
        ),
        (("compile",), {"eager", "eager+graph"}),
        (("graphs",), {"eager", "inductor", "max-autotune"}),
        (("compile", "graphs"), {"eager"}),
    ],
)
def test_baselines_of_a_family_left_out_are_not_benchmarked(without, remaining, region, place):
    there = replace(
        place,
        device=torch.device("cuda"),
        settings=place.settings.but(without=without, autotune=True),
    )
    assert set(list_baseline_schedules(region, there)) == remaining


@pytest.mark.parametrize(
    ("device", "without", "joins"),
    [
        ("cuda", (), True),
        ("cuda", ("compile",), False),
        # What calls blocks one by one is no faster without a graph.
        ("cuda", ("graphs",), False),
        ("cpu", (), False),
    ],
)
def test_a_region_of_equal_layers_is_compiled_block_by_block_too(
    device, without, joins, place, monkeypatch
):
    """The quick tier runs it so: a search that left it out would end with a slower model."""
    monkeypatch.setattr(quick, "MIN_COPIED_STEPS", 10)
    there = replace(
        place, device=torch.device(device), settings=place.settings.but(without=without)
    )
    stack = capture_region(make_stack(6), torch.randn(ROWS, WIDTH))
    added = {"regional+graph"} if joins else set()
    assert set(list_baseline_schedules(stack, there)) & {"regional", "regional+graph"} == added
