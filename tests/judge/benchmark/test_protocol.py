"""A measurement takes as many pairs as its plan, its budget and its margin ask for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Literal

import pytest
import torch

from tests.judge.benchmark.scripted_sampler import (
    FAST,
    ScriptedSampler,
    make_costs,
    sleep_2_ms,
    sleep_half_ms,
)
from tests.virtual_clock import install_virtual_clock
from torch_cudal1.judge.benchmark.protocol import LocalSampler, measure, sample_pairs
from torch_cudal1.judge.benchmark.statistics import summarise
from torch_cudal1.judge.benchmark.timing import (
    L2,
    WarmCosts,
)
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS, TimingPlan

CPU = torch.device("cpu")


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = install_virtual_clock(monkeypatch)
    calls = (lambda: clock.advance(50_000.0), lambda: clock.advance(500.0))
    summary = summarise(sample_pairs(*calls, CPU, budget_s=2.0))
    assert summary.low == pytest.approx(summary.speedup) == pytest.approx(100.0)
    assert summary.b_us == pytest.approx(500.0)


@pytest.mark.parametrize(
    ("margin", "slowest_us", "pairs"),
    [
        (None, 50_000.0, 56),
        # Twice as fast in every bucket: more pairs would only find out by how much.
        (1.02, 50_000.0, 28),
        # The margin lies among the buckets.
        (1.02, 150_000.0, 56),
    ],
)
def test_half_of_the_pairs_tell_a_plain_difference(
    margin: float | None, slowest_us: float, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = install_virtual_clock(monkeypatch)
    # Four calls as fast, four as slow, and so on.
    calls_us = itertools.cycle([50_000.0] * 4 + [slowest_us] * 4)
    samples = sample_pairs(
        lambda: clock.advance(100_000.0),
        lambda: clock.advance(next(calls_us)),
        CPU,
        budget_s=60.0,
        margin=margin,
    )
    assert len(samples) == pairs


STEADY, RISING = [1.5] * 30, [0.9 * 1.1**position for position in range(30)]


def test_agreeing_buckets_are_sampled_once_and_the_lower_speedup_decides() -> None:
    sampler = ScriptedSampler({"cold": [1.2] * 7, "hot": STEADY[:7]})
    measurement = measure(sampler, FAST)
    assert sampler.requested_pairs == {"cold": 56, "hot": 56}
    assert (measurement.deciding, measurement.rounds, measurement.steady) == ("cold", 1, True)
    assert measurement.summary.speedup == pytest.approx(1.2)
    assert measurement.first_call_us == (100.0, 100.0)


def test_only_the_state_whose_buckets_disagree_gets_three_times_the_pairs() -> None:
    sampler = ScriptedSampler({"cold": RISING, "hot": STEADY})
    measurement = measure(sampler, FAST)
    assert sampler.requested_pairs == {"cold": 3 * 56, "hot": 56}
    assert (measurement.rounds, measurement.steady) == (3, False)
    assert measurement.summaries["cold"].pairs == 3 * 56


WIDE, SLOWER, ACROSS = (
    [first * 1.05**position for position in range(30)] for first in (1.2, 0.3, 0.95)
)

LEVEL = [1.01, 1.01, 1.3, 1.3] * 10  # across the margin, too few below it for a sign test


@pytest.mark.parametrize(
    ("gate", "cold", "hot", "rounds"),
    [
        ("widen", WIDE, STEADY, 1),  # all of both lies above the margin
        ("widen", SLOWER, WIDE, 1),  # the lower one decides, and lies below it
        ("widen", ACROSS, WIDE, 3),  # 0.95 to 1.27, then more
        ("widen", STEADY, ACROSS, 3),
        ("widen", LEVEL, WIDE, 1),  # whatever its interval, its centre is far from the margin
        ("reject", WIDE, STEADY, 3),  # disagreement is a reason to refuse: more pairs may settle it
    ],
)
def test_buckets_that_disagree_on_one_side_of_the_margin_decide(
    gate: Literal["widen", "reject"], cold: list[float], hot: list[float], rounds: int
) -> None:
    measurement = measure(
        ScriptedSampler({"cold": cold, "hot": hot}), replace(FAST, gate=gate, margin=1.05)
    )
    assert (measurement.rounds, measurement.steady) == (rounds, False)


@pytest.mark.parametrize("margin", [None, 1.4])
def test_without_a_margin_or_with_one_within_the_range_more_pairs_are_taken(
    margin: float | None,
) -> None:
    assert (
        measure(ScriptedSampler({"cold": WIDE, "hot": WIDE}), replace(FAST, margin=margin)).rounds
        == 3
    )


def test_the_paper_takes_no_second_round() -> None:
    sampler = ScriptedSampler({"hot": RISING})
    sampler.temperatures = ("hot",)
    assert measure(sampler, replace(TIMING_PLANS["cudal1"], window_s=1e-9)).rounds == 1


def test_a_window_is_filled_with_pairs() -> None:
    measurement = measure(
        LocalSampler(sleep_half_ms, sleep_half_ms, CPU),
        replace(TIMING_PLANS["cudal1"], window_s=0.7),
    )
    assert 0.5 < measurement.seconds < 30
    assert measurement.summary.pairs >= 7


def test_past_its_budget_a_measurement_still_has_seven_buckets() -> None:
    measurement = measure(LocalSampler(sleep_2_ms, sleep_2_ms, CPU), replace(FAST, budget_s=1e-3))
    assert 7 <= measurement.summary.pairs <= 14


SLOW_S = replace(FAST, budget_s=1e-9)  # every pair is a bucket of its own, as of calls of a second


class SlowSampler(ScriptedSampler):
    """Scripted ratios of calls that are slow for the plan."""

    temperatures: tuple[L2, ...] = ("hot",)

    def warm_up(self) -> tuple[WarmCosts, WarmCosts]:
        return make_costs(2e6), make_costs(1e5)


@pytest.mark.parametrize(
    ("ratios", "margin", "pairs"),
    [
        (
            [40.0, 44.0, 42.0, 9.0, 9.0, 9.0, 9.0],
            1.05,
            3,
        ),  # far above: measured again in a fresh process anyhow
        ([0.50, 0.51, 0.50, 9.0, 9.0, 9.0, 9.0], 1.05, 3),  # far below
        ([1.00, 1.001, 1.0, 9.0, 9.0, 9.0, 9.0], 1.05, 3),  # one kernel against itself
        (
            [64.0, 5.6, 60.0, 62.0, 63.0, 61.0, 62.0],
            1.05,
            5,
        ),  # one pair was disturbed: three do not settle it
        (
            [2.0, 2.01, 2.0, 2.0, 2.01, 2.0, 2.0],
            1.05,
            7,
        ),  # above the margin, and not surprising enough to be measured again
        ([3.005] * 7, 1.05, 7),  # a score of 3.00 is no surprise yet
        ([1.04, 1.06, 1.04, 1.06, 1.04, 1.06, 1.05], 1.05, 7),
        ([40.0, 44.0, 42.0, 44.0, 40.0, 42.0, 42.0], None, 7),
    ],
)
def test_few_pairs_of_slow_calls_end_a_measurement_that_is_settled(
    ratios: list[float], margin: float | None, pairs: int
) -> None:
    measurement = measure(SlowSampler({"hot": ratios}), replace(SLOW_S, rounds=1, margin=margin))
    assert measurement.summary.pairs == pairs
    assert (measurement.summary.low >= 1.05) == (min(ratios[:pairs]) > 1.05)


def test_a_measurement_of_fast_calls_does_not_end_with_a_few_pairs() -> None:
    measurement = measure(
        ScriptedSampler({"cold": [40.0] * 7, "hot": [40.0] * 7}), replace(FAST, margin=1.05)
    )
    assert measurement.summary.pairs == 28


def test_every_state_of_the_cache_must_be_settled() -> None:
    class TwoStates(SlowSampler):
        temperatures: tuple[L2, ...] = ("cold", "hot")

    assert (
        measure(
            TwoStates({"cold": [40.0] * 7, "hot": [2.0] * 7}),
            replace(SLOW_S, rounds=1, margin=1.05),
        ).summary.pairs
        == 7
    )
    assert (
        measure(
            TwoStates({"cold": [40.0] * 7, "hot": [0.9] * 7}),
            replace(SLOW_S, rounds=1, margin=1.05),
        ).summary.pairs
        == 3
    )


@pytest.mark.parametrize("gate", ["reject", "paper"])
def test_a_plan_that_refuses_unstable_measurements_takes_all_its_pairs(
    gate: Literal["reject", "paper"],
) -> None:
    plan = replace(SLOW_S, gate=gate, rounds=1, margin=1.05)
    assert measure(SlowSampler({"hot": [40.0] * 7}), plan).summary.pairs == 7


@pytest.mark.parametrize(
    ("cold", "hot", "pairs"),
    [
        ([1.3] * 14, [1.1] * 14, 28),
        ([1.3] * 14, [1.0] * 14, 28),  # the lower one decides
        ([1.06] * 6 + [1.04] + [1.2] * 7, [1.3] * 14, 56),  # one bucket below, six above
        ([1.04] * 6 + [1.06] + [1.04] * 7, [1.3] * 14, 28),  # 24 pairs of 28 below: hopeless
        ([1.04, 1.06] * 7, [1.3] * 14, 56),
    ],
)
def test_a_decision_that_is_clear_after_half_of_the_pairs_takes_no_more(
    cold: list[float], hot: list[float], pairs: int
) -> None:
    sampler = ScriptedSampler({"cold": cold, "hot": hot})
    assert measure(sampler, replace(FAST, rounds=1, margin=1.05)).summary.pairs == pairs
    assert set(sampler.requested_pairs.values()) == {pairs}


@pytest.mark.parametrize(
    "plan", [FAST, replace(FAST, gate="reject", margin=1.05), replace(FAST, pairs=7, margin=1.05)]
)
def test_other_measurements_are_not_taken_in_halves(plan: TimingPlan) -> None:
    sampler = ScriptedSampler({"cold": [1.3] * 7, "hot": [1.3] * 7})
    assert measure(sampler, plan).summary.pairs == 7 * plan.pairs
