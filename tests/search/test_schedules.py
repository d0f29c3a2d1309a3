"""The order in which schedules are tried, and the other way to run the steps beside kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.search.scripted_kernels import patch_search
from torch_cudal1 import judge
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.program import Alloc, Aten, Call, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.ir.records import (
    Candidate,
    Region,
)
from torch_cudal1.ir.schedule import Schedule
from torch_cudal1.search.schedules import (
    order_for_program,
    order_schedules,
    propose_other_base,
)
from torch_cudal1.store.context import TuneContext


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneContext:
    return patch_search(tmp_path, monkeypatch)


def _kernel_and(operators: int) -> Program:
    """A kernel of its own, then so many element-wise operators."""
    spec = TensorSpec("float32", (8,), (1,), "cuda")
    kernel = Program(
        (spec,),
        (
            Alloc(1, spec),
            Launch(
                "k", "k", (1, 1, 1), 32, 0, (LaunchArg("ptr", Value(0)), LaunchArg("ptr", Value(1)))
            ),
        ),
        (1,),
    )
    steps = [
        Aten("aten.relu.default", (Value(1 + index),), (), (2 + index,))
        for index in range(operators)
    ]
    return Program((spec,), (Call(kernel, (0,), (1,)), *steps), (1 + operators,))


@pytest.mark.parametrize(
    ("operators", "names", "expected"),
    [
        (0, ["inductor", "eager"], ["eager", "inductor"]),
        (8, ["inductor", "eager"], ["inductor", "eager"]),
        (9, ["inductor", "eager", "inductor+graph"], ["inductor", "inductor+graph"]),
        (9, ["eager", "eager+graph"], ["eager", "eager+graph"]),
    ],
)
def test_many_steps_beside_kernels_are_not_left_to_eager(
    operators: int, names: list[str], expected: list[str]
) -> None:
    schedules = [Schedule.parse(name) for name in names]
    assert order_for_program(_kernel_and(operators), schedules) == expected


@pytest.mark.parametrize(
    ("operators", "schedule", "order", "other"),
    [
        (1, "inductor", ["inductor", "inductor+graph", "eager", "eager+graph"], "eager"),
        (
            1,
            "inductor+graph",
            ["inductor+graph", "inductor", "eager+graph", "eager"],
            "eager+graph",
        ),
        (1, "inductor", ["inductor", "eager"], None),  # it was tried
        (0, "eager", ["inductor", "inductor+graph", "eager"], None),  # there is nothing to compile
        (9, "inductor", ["inductor", "inductor+graph", "eager"], None),  # there is much
    ],
)
def test_the_best_is_tried_the_other_way_at_last_where_its_kernels_leave_little(
    operators: int, schedule: Schedule, order: list[str], other: str | None
) -> None:
    best = Candidate(_kernel_and(operators), schedule, "builtin", ("attention",))
    proposed = list(propose_other_base(best, [Schedule.parse(name) for name in order]))
    assert [
        (candidate.schedule, candidate.program, candidate.techniques) for candidate in proposed
    ] == ([(other, best.program, ("attention",))] if other else [])


def test_a_best_without_kernels_is_not_tried_again(place: TuneContext) -> None:
    with torch.no_grad():
        (region,) = capture_regions(nn.ReLU(), (torch.randn(8),))
    assert not list(
        propose_other_base(
            Candidate(region.program, "inductor", "builtin"),
            ["inductor", "inductor+graph", "eager"],
        )
    )
    assert not list(propose_other_base(None, ["inductor", "inductor+graph", "eager"]))


@pytest.mark.parametrize(
    ("medians_us", "order"),
    [
        # two launches of at most 5 us each are much of 100 us and little of 1 ms
        (
            {"eager": 140.0, "inductor": 110.0, "eager+graph": 120.0, "inductor+graph": 100.0},
            [3, 1, 2, 0],
        ),
        (
            {"eager": 1100.0, "inductor": 1010.0, "eager+graph": 1090.0, "inductor+graph": 1000.0},
            [1, 3, 0, 2],
        ),
        # far slower ones come last, whatever they are
        (
            {"eager": 200.0, "inductor": 400.0, "eager+graph": 100.0, "inductor+graph": 90.0},
            [3, 2, 0, 1],
        ),
        ({"eager": 100.0}, [0]),
    ],
)
def test_schedules_come_in_the_order_in_which_a_candidate_wins_most_likely(
    region, medians_us, order
):
    names = ["eager", "inductor", "eager+graph", "inductor+graph"]
    ranking = judge.BaselineRanking(Candidate(region.program, "eager", "baseline"), medians_us, {})
    assert order_schedules(ranking, region) == [names[at] for at in order]


@pytest.mark.parametrize(
    ("by_blocks_us", "order"),
    [
        (70.0, ["regional+graph", "eager+graph", "inductor"]),
        (90.0, ["inductor+graph", "eager+graph", "inductor"]),
    ],
)
def test_a_candidate_is_compiled_whole_or_by_blocks_whichever_was_faster(
    region: Region, by_blocks_us: float, order: list[str]
) -> None:
    medians_us = {
        "eager+graph": 85.0,
        "inductor": 200.0,
        "inductor+graph": 80.0,
        "regional+graph": by_blocks_us,
    }
    ranking = judge.BaselineRanking(Candidate(region.program, "eager", "baseline"), medians_us, {})
    assert order_schedules(ranking, region) == order


def test_a_graph_that_copies_more_than_it_saves_comes_after_the_same_without_one() -> None:
    """Launching is 5 us of 80, and half a gigabyte of inputs and results takes longer."""

    def order(rows: int) -> list[str]:
        inputs = tuple(TensorSpec("float32", (rows, 1024), (1024, 1), "cuda") for _ in range(2))
        program = Program(
            inputs, (Aten("aten.add.Tensor", (Value(0), Value(1)), (), (2,), False),), (2,)
        )
        ranking = judge.BaselineRanking(
            Candidate(program, "eager", "baseline"), {"inductor": 80.0, "inductor+graph": 80.0}, {}
        )
        return list(
            order_schedules(ranking, Region(program, ("input", "parameter"), "inference", "whole"))
        )

    assert order(64) == ["inductor+graph", "inductor"]
    assert order(1 << 17) == ["inductor", "inductor+graph"]
