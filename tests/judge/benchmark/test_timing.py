"""Samples on a real clock: orders of magnitude only, since other processes share the machine."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Literal

import pytest
import torch

from tests.virtual_clock import install_virtual_clock
from torch_cudal1.judge.benchmark import timing
from torch_cudal1.judge.benchmark.clock import Call, clock_of
from torch_cudal1.judge.benchmark.protocol import LocalSampler, measure, sample_pairs
from torch_cudal1.judge.benchmark.statistics import summarise
from torch_cudal1.judge.benchmark.timing import (
    L2,
    SampleBatch,
    WarmCosts,
    batch_for,
    device_time_us,
    interleave,
    measure_side,
    sample_bucket,
    temperatures,
    warm_up,
)
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS, TimingPlan

CPU = torch.device("cpu")
FAST = TIMING_PLANS["fast"]


def slow() -> None:
    time.sleep(2e-3)


def quick() -> None:
    time.sleep(0.5e-3)


def side(call_us: float, flushed_us: float | None = None) -> WarmCosts:
    return WarmCosts(call_us, call_us, call_us if flushed_us is None else flushed_us)


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = install_virtual_clock(monkeypatch)
    calls = (lambda: clock.advance(50_000.0), lambda: clock.advance(500.0))
    summary = summarise(sample_pairs(*calls, CPU, budget_s=2.0))
    assert summary.low == pytest.approx(summary.speedup) == pytest.approx(100.0)
    assert summary.b_us == pytest.approx(500.0)


def test_interleaved_samples_keep_the_order_of_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = install_virtual_clock(monkeypatch)
    calls = {"slow": lambda: clock.advance(2_000.0), "quick": lambda: clock.advance(10.0)}
    samples = interleave(calls, CPU, budget_s=0.5)
    assert len(samples["slow"]) == len(samples["quick"]) >= 3
    assert min(samples["slow"]) > max(samples["quick"])


def test_the_real_clock_sees_time_pass() -> None:
    (reading,) = clock_of(CPU).read((lambda: time.sleep(0.01),), (0,))
    assert reading.wall_us >= 10_000.0


@pytest.mark.parametrize(
    ("other_us", "ran", "samples"),
    [
        (1.5e6, True, 2),  # the settling call and one more
        (1.1e6, True, 3),  # too near for two
        (1.5e6, False, 3),  # the settling call may have been the first of all
        (1e5, True, 5),  # one of them is fast: five
        (9e5, True, 30),  # and near the other
        (1e5, False, 30),
    ],
)
def test_slow_calls_are_raced_until_the_fastest_is_far_ahead(
    other_us: float, ran: bool, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {slow: 1e6, quick: other_us}
    monkeypatch.setattr(timing, "warm_up", lambda run, device, settle_s: side(costs[run]))
    monkeypatch.setattr(timing, "_sample", lambda run, calls, device: costs[run])
    found = interleave(
        {"one": slow, "other": quick}, CPU, budget_s=1e6 if samples >= 5 else 1.0, ran=ran
    )
    assert found == {"one": [1e6] * samples, "other": [other_us] * samples}


def test_warming_tells_the_first_call_apart() -> None:
    calls = 0

    def lazy() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            time.sleep(0.05)

    found = warm_up(lazy, CPU)
    assert found.first_us > 50_000 > found.call_us
    assert calls > 3


@pytest.mark.parametrize(
    ("a", "b", "l2", "calls"),
    [
        (side(50.0), side(50.0), "hot", (50, 50)),
        (side(50.0), side(45.0), "hot", (56, 56)),  # the faster one fills a sample
        (side(150.0), side(50.0), "hot", (50, 50)),
        (
            side(500.0),
            side(50.0),
            "hot",
            (20, 20),
        ),  # the slower one is timed for four samples at most
        (
            side(450.0),
            side(22.5),
            "hot",
            (22, 22),
        ),  # one kernel; something else had the GPU while one side warmed up
        (side(10_000.0), side(50.0), "hot", (1, 10)),  # a twentieth of a long call
        (side(0.001), side(0.001), "hot", (5_000, 5_000)),
        (
            side(50.0, 200.0),
            side(50.0, 200.0),
            "cold",
            (25, 25),
        ),  # the flush takes three times as long: half the calls
        (side(50.0, 60.0), side(50.0, 60.0), "cold", (50, 50)),
    ],
)
def test_both_sides_get_the_calls_that_fill_a_sample(
    a: WarmCosts, b: WarmCosts, l2: str, calls: tuple[int, int]
) -> None:
    assert batch_for(FAST, l2, (a, b)).calls == calls  # type: ignore[arg-type]


@pytest.mark.parametrize("l2", ["cold", "hot"])
def test_one_kernel_is_as_fast_as_itself_though_it_warmed_up_beside_another_process(l2: L2) -> None:
    class Shared:
        """A call takes 20 us, the join of a sample 500: others have the GPU in turn."""

        temperatures: tuple[L2, ...] = (l2,)

        def warm_up(self) -> tuple[WarmCosts, WarmCosts]:
            return side(450.0), side(22.5)

        def take_samples(self, batch: SampleBatch) -> list[tuple[float, float]]:
            a, b = (20.0 + 500.0 / calls for calls in batch.calls)
            return [(a, b)] * batch.pairs

    assert measure(Shared(), replace(FAST, margin=1.05)).summary.speedup == 1.0


def test_the_papers_samples_are_single_runs() -> None:
    assert batch_for(TIMING_PLANS["cudal1"], "hot", (side(50.0), side(500.0))).calls == (1, 1)


@pytest.mark.parametrize("order", ["abba", "random"])
def test_sides_alternate_and_each_leads_about_half_of_the_pairs(order: str) -> None:
    log: list[str] = []
    found = sample_bucket(
        lambda: log.append("a"),
        lambda: log.append("b"),
        CPU,
        SampleBatch("hot", 200, (1, 1), order),
    )  # type: ignore[arg-type]
    assert len(found) == 200
    leaders = log[::2]
    assert all({one, other} == {"a", "b"} for one, other in zip(log[::2], log[1::2], strict=True))
    if order == "abba":
        assert all(
            {one, other} == {"a", "b"}
            for one, other in zip(leaders[::2], leaders[1::2], strict=True)
        )
        assert {tuple(leaders[i : i + 2]) for i in range(0, 200, 2)} == {
            ("a", "b"),
            ("b", "a"),
        }  # blocks start at random
    assert 50 < leaders.count("a") < 150


def test_times_belong_to_their_side_whoever_leads() -> None:
    pairs = sample_bucket(slow, lambda: None, CPU, SampleBatch("hot", 10, (1, 1)))
    assert all(a > 1_500 for a, _ in pairs)
    assert sum(b < a for a, b in pairs) >= 6  # a busy machine may stop the idle side too


def test_the_last_results_of_the_second_side_are_kept_when_asked_for() -> None:
    numbers = iter(range(100))
    kept: deque[object] = deque(maxlen=3)
    sample_bucket(lambda: None, lambda: next(numbers), CPU, SampleBatch("hot", 4, (1, 5)), kept)
    assert list(kept) == [17, 18, 19]


def test_hidden_host_time_is_in_the_host_time() -> None:
    found = measure_side(quick, CPU)
    assert found.host_us > 500
    assert (found.device_us, found.sync_ratio, device_time_us(quick, CPU)) == (None, None, 0.0)


def test_the_cpu_has_no_cache_to_flush() -> None:
    assert temperatures(CPU, FAST) == ("hot",)
    assert temperatures(torch.device("cuda"), FAST) == ("cold", "hot")
    assert temperatures(torch.device("cuda"), TIMING_PLANS["cudal1"]) == ("hot",)


class Scripted:
    """A sampler that answers from a list of ratios and counts what it was asked for."""

    temperatures: tuple[L2, ...] = ("cold", "hot")

    def __init__(self, ratios: dict[str, list[float]]) -> None:
        self.ratios = {l2: iter(values) for l2, values in ratios.items()}
        self.asked: dict[str, int] = dict.fromkeys(ratios, 0)

    def warm_up(self) -> tuple[WarmCosts, WarmCosts]:
        return side(100.0), side(100.0)

    def take_samples(self, batch: SampleBatch) -> list[tuple[float, float]]:
        self.asked[batch.l2] += batch.pairs
        ratio = next(self.ratios[batch.l2])
        return [(100.0 * ratio, 100.0)] * batch.pairs


STEADY, RISING = [1.5] * 30, [0.9 * 1.1**position for position in range(30)]


def test_agreeing_buckets_are_sampled_once_and_the_lower_speedup_decides() -> None:
    sampler = Scripted({"cold": [1.2] * 7, "hot": STEADY[:7]})
    found = measure(sampler, FAST)
    assert sampler.asked == {"cold": 56, "hot": 56}
    assert (found.deciding, found.rounds, found.steady) == ("cold", 1, True)
    assert found.summary.speedup == pytest.approx(1.2)
    assert found.first_call_us == (100.0, 100.0)


def test_only_the_state_whose_buckets_disagree_gets_three_times_the_pairs() -> None:
    sampler = Scripted({"cold": RISING, "hot": STEADY})
    found = measure(sampler, FAST)
    assert sampler.asked == {"cold": 3 * 56, "hot": 56}
    assert (found.rounds, found.steady) == (3, False)
    assert found.summaries["cold"].pairs == 3 * 56


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
    found = measure(Scripted({"cold": cold, "hot": hot}), replace(FAST, gate=gate, margin=1.05))
    assert (found.rounds, found.steady) == (rounds, False)


@pytest.mark.parametrize("margin", [None, 1.4])
def test_who_decides_by_no_margin_or_one_within_the_range_gets_more_pairs(
    margin: float | None,
) -> None:
    assert measure(Scripted({"cold": WIDE, "hot": WIDE}), replace(FAST, margin=margin)).rounds == 3


def test_the_paper_takes_no_second_round() -> None:
    sampler = Scripted({"hot": RISING})
    sampler.temperatures = ("hot",)
    assert measure(sampler, replace(TIMING_PLANS["cudal1"], window_s=1e-9)).rounds == 1


def test_a_window_is_filled_with_pairs() -> None:
    found = measure(LocalSampler(quick, quick, CPU), replace(TIMING_PLANS["cudal1"], window_s=0.7))
    assert 0.5 < found.seconds < 30
    assert found.summary.pairs >= 7


def test_past_its_budget_a_measurement_still_has_seven_buckets() -> None:
    found = measure(LocalSampler(slow, slow, CPU), replace(FAST, budget_s=1e-3))
    assert 7 <= found.summary.pairs <= 14


SLOW_S = replace(FAST, budget_s=1e-9)  # every pair is a bucket of its own, as of calls of a second


class Slow(Scripted):
    """Scripted ratios of calls that are slow for the plan."""

    temperatures: tuple[L2, ...] = ("hot",)

    def warm_up(self) -> tuple[WarmCosts, WarmCosts]:
        return side(2e6), side(1e5)


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
        ),  # above the margin, and nobody would measure it again
        ([3.005] * 7, 1.05, 7),  # a score of 3.00 is no surprise yet
        ([1.04, 1.06, 1.04, 1.06, 1.04, 1.06, 1.05], 1.05, 7),
        ([40.0, 44.0, 42.0, 44.0, 40.0, 42.0, 42.0], None, 7),
    ],
)
def test_few_pairs_of_slow_calls_end_a_measurement_that_is_settled(
    ratios: list[float], margin: float | None, pairs: int
) -> None:
    found = measure(Slow({"hot": ratios}), replace(SLOW_S, rounds=1, margin=margin))
    assert found.summary.pairs == pairs
    assert (found.summary.low >= 1.05) == (min(ratios[:pairs]) > 1.05)


def test_a_measurement_of_fast_calls_does_not_end_with_a_few_pairs() -> None:
    found = measure(Scripted({"cold": [40.0] * 7, "hot": [40.0] * 7}), replace(FAST, margin=1.05))
    assert found.summary.pairs == 28


def test_every_state_of_the_cache_must_be_settled() -> None:
    class Both(Slow):
        temperatures: tuple[L2, ...] = ("cold", "hot")

    assert (
        measure(
            Both({"cold": [40.0] * 7, "hot": [2.0] * 7}), replace(SLOW_S, rounds=1, margin=1.05)
        ).summary.pairs
        == 7
    )
    assert (
        measure(
            Both({"cold": [40.0] * 7, "hot": [0.9] * 7}), replace(SLOW_S, rounds=1, margin=1.05)
        ).summary.pairs
        == 3
    )


@pytest.mark.parametrize("gate", ["reject", "paper"])
def test_a_plan_that_refuses_unstable_measurements_takes_all_its_pairs(
    gate: Literal["reject", "paper"],
) -> None:
    plan = replace(SLOW_S, gate=gate, rounds=1, margin=1.05)
    assert measure(Slow({"hot": [40.0] * 7}), plan).summary.pairs == 7


def test_beside_a_slow_call_a_fast_one_is_timed_for_a_part_of_it() -> None:
    assert batch_for(FAST, "hot", (side(1e6), side(20_000.0))).calls == (1, 3)


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
def test_a_decision_that_is_plain_after_half_of_the_pairs_takes_no_more(
    cold: list[float], hot: list[float], pairs: int
) -> None:
    sampler = Scripted({"cold": cold, "hot": hot})
    assert measure(sampler, replace(FAST, rounds=1, margin=1.05)).summary.pairs == pairs
    assert set(sampler.asked.values()) == {pairs}


@pytest.mark.parametrize(
    "plan", [FAST, replace(FAST, gate="reject", margin=1.05), replace(FAST, pairs=7, margin=1.05)]
)
def test_other_measurements_are_not_taken_in_halves(plan: TimingPlan) -> None:
    sampler = Scripted({"cold": [1.3] * 7, "hot": [1.3] * 7})
    assert measure(sampler, plan).summary.pairs == 7 * plan.pairs


def test_calls_that_a_gpu_began_with_before_all_were_queued_are_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    leads: list[float] = []

    def begin() -> Call:
        begun.append(1)
        return lambda: None

    def queued(
        run: Call, calls: int, device: torch.device, sink: object, lead_us: float
    ) -> tuple[float, float, bool]:
        leads.append(lead_us)
        return 1_000.0, 10.0 * len(leads), len(leads) < 3

    monkeypatch.setattr(timing, "_time_queue", queued)
    found = timing.time_queued_calls(begin, 10, CPU, deque(), 50.0)
    assert leads == pytest.approx([600.0, 1_440.0, 1_728.0])
    assert len(begun) == 3, "each time from the same beginning"
    assert (found.spent_us, found.host_us) == (30.0, 100.0)
