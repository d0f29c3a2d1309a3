"""The timing plans hold the numbers of the protocol, and nonsense cannot be built."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torch_cudal1.judge.benchmark.timing_plan import BUCKETS, TIMING_PLANS, TimingProfile

NUMBERS: list[tuple[TimingProfile, int, float, str, int]] = [
    ("fast", 8, 20e3, "widen", 1),
    ("standard", 25, 100e3, "reject", 1),
    ("strict", 40, 4e5, "reject", 2),
    ("train", 6, 1.5e3, "reject", 1),
    ("cudal1", 10, 10.0, "paper", 1),
]


@pytest.mark.parametrize(("name", "pairs", "side_us", "gate", "processes"), NUMBERS)
def test_a_plan_has_its_numbers(
    name: TimingProfile, pairs: int, side_us: float, gate: str, processes: int
) -> None:
    plan = TIMING_PLANS[name]
    assert (plan.profile, plan.pairs, plan.side_us, plan.gate, plan.processes) == (
        name,
        pairs,
        side_us,
        gate,
        processes,
    )


def test_every_plan_is_in_the_table() -> None:
    assert set(TIMING_PLANS) == {name for name, *_ in NUMBERS}
    assert BUCKETS == 7


def test_training_runs_are_between_a_twentieth_and_half_a_millisecond() -> None:
    assert 50 <= TIMING_PLANS["train"].sample_us <= 500


def test_the_papers_window_is_twenty_minutes_and_a_budget_does_not_cut_it() -> None:
    plan = TIMING_PLANS["cudal1"]
    assert plan.window_s == 1_200
    assert plan.budget_s > plan.window_s
    assert (plan.rounds, plan.order, plan.hot_only) == (1, "random", True)


def test_at_least_one_timed_call_a_bucket_is_checked_and_eight_in_strict() -> None:
    assert all(plan.outputs >= BUCKETS for plan in TIMING_PLANS.values())
    assert TIMING_PLANS["strict"].outputs >= 8


@pytest.mark.parametrize(
    "change",
    [
        {"pairs": 0},
        {"rounds": 0},
        {"processes": 0},
        {"side_us": 0.0},
        {"budget_s": 0.0},
        {"window_s": 0.0},
    ],
)
def test_a_plan_that_cannot_be_carried_out_cannot_be_built(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"plan|window"):
        replace(TIMING_PLANS["fast"], **change)
