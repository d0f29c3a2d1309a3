"""Samples on a real clock: orders of magnitude only, since other processes share the machine."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import pytest
import torch

from tests.judge.benchmark.scripted_sampler import FAST, make_costs, sleep_2_ms, sleep_half_ms
from tests.virtual_clock import install_virtual_clock
from torch_cudal1.judge.benchmark import timing
from torch_cudal1.judge.benchmark.clock import Call, choose_clock
from torch_cudal1.judge.benchmark.protocol import measure
from torch_cudal1.judge.benchmark.timing import (
    L2,
    SampleBatch,
    WarmCosts,
    batch_for,
    interleave,
    list_l2_states,
    measure_device_time_us,
    measure_side,
    sample_bucket,
    warm_up,
)
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS

CPU = torch.device("cpu")


def test_interleaved_samples_keep_the_order_of_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = install_virtual_clock(monkeypatch)
    calls = {"slow": lambda: clock.advance(2_000.0), "quick": lambda: clock.advance(10.0)}
    samples = interleave(calls, CPU, budget_s=0.5)
    assert len(samples["slow"]) == len(samples["quick"]) >= 3
    assert min(samples["slow"]) > max(samples["quick"])


def test_the_real_clock_sees_time_pass() -> None:
    (reading,) = choose_clock(CPU).read((lambda: time.sleep(0.01),), (0,))
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
def test_slow_calls_are_interleaved_until_the_fastest_is_far_ahead(
    other_us: float, ran: bool, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {sleep_2_ms: 1e6, sleep_half_ms: other_us}
    monkeypatch.setattr(timing, "warm_up", lambda run, device, settle_s: make_costs(costs[run]))
    monkeypatch.setattr(timing, "_sample", lambda run, calls, device: costs[run])
    times = interleave(
        {"one": sleep_2_ms, "other": sleep_half_ms},
        CPU,
        budget_s=1e6 if samples >= 5 else 1.0,
        ran=ran,
    )
    assert times == {"one": [1e6] * samples, "other": [other_us] * samples}


def test_warming_up_reports_the_first_call_apart() -> None:
    calls = 0

    def lazy() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            time.sleep(0.05)

    costs = warm_up(lazy, CPU)
    assert costs.first_us > 50_000 > costs.call_us
    assert calls > 3


@pytest.mark.parametrize(
    ("a", "b", "l2", "calls"),
    [
        (make_costs(50.0), make_costs(50.0), "hot", (50, 50)),
        (make_costs(50.0), make_costs(45.0), "hot", (56, 56)),  # the faster one fills a sample
        (make_costs(150.0), make_costs(50.0), "hot", (50, 50)),
        (
            make_costs(500.0),
            make_costs(50.0),
            "hot",
            (20, 20),
        ),  # the slower one is timed for four samples at most
        (
            make_costs(450.0),
            make_costs(22.5),
            "hot",
            (22, 22),
        ),  # one kernel; something else had the GPU while one side warmed up
        (make_costs(10_000.0), make_costs(50.0), "hot", (1, 10)),  # a twentieth of a long call
        (make_costs(0.001), make_costs(0.001), "hot", (5_000, 5_000)),
        (
            make_costs(50.0, 200.0),
            make_costs(50.0, 200.0),
            "cold",
            (25, 25),
        ),  # the flush takes three times as long: half the calls
        (make_costs(50.0, 60.0), make_costs(50.0, 60.0), "cold", (50, 50)),
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
            return make_costs(450.0), make_costs(22.5)

        def take_samples(self, batch: SampleBatch) -> list[tuple[float, float]]:
            a, b = (20.0 + 500.0 / calls for calls in batch.calls)
            return [(a, b)] * batch.pairs

    assert measure(Shared(), replace(FAST, margin=1.05)).summary.speedup == 1.0


def test_the_papers_samples_are_single_runs() -> None:
    assert batch_for(
        TIMING_PLANS["cudal1"], "hot", (make_costs(50.0), make_costs(500.0))
    ).calls == (1, 1)


@pytest.mark.parametrize("order", ["abba", "random"])
def test_sides_alternate_and_each_leads_about_half_of_the_pairs(order: str) -> None:
    log: list[str] = []
    pairs = sample_bucket(
        lambda: log.append("a"),
        lambda: log.append("b"),
        CPU,
        SampleBatch("hot", 200, (1, 1), order),
    )  # type: ignore[arg-type]
    assert len(pairs) == 200
    leaders = log[::2]
    assert all(
        {first, second} == {"a", "b"} for first, second in zip(log[::2], log[1::2], strict=True)
    )
    if order == "abba":
        assert all(
            {first, second} == {"a", "b"}
            for first, second in zip(leaders[::2], leaders[1::2], strict=True)
        )
        assert {tuple(leaders[i : i + 2]) for i in range(0, 200, 2)} == {
            ("a", "b"),
            ("b", "a"),
        }  # blocks start at random
    assert 50 < leaders.count("a") < 150


def test_times_belong_to_their_side_whichever_leads() -> None:
    pairs = sample_bucket(sleep_2_ms, lambda: None, CPU, SampleBatch("hot", 10, (1, 1)))
    assert all(a > 1_500 for a, _ in pairs)
    assert sum(b < a for a, b in pairs) >= 6  # a busy machine may stop the idle side too


def test_the_last_results_of_the_second_side_are_kept_on_request() -> None:
    numbers = iter(range(100))
    last_results: deque[object] = deque(maxlen=3)
    sample_bucket(
        lambda: None, lambda: next(numbers), CPU, SampleBatch("hot", 4, (1, 5)), last_results
    )
    assert list(last_results) == [17, 18, 19]


def test_hidden_host_time_is_in_the_host_time() -> None:
    times = measure_side(sleep_half_ms, CPU)
    assert times.host_us > 500
    assert (times.device_us, times.sync_ratio, measure_device_time_us(sleep_half_ms, CPU)) == (
        None,
        None,
        0.0,
    )


def test_the_cpu_has_no_cache_to_flush() -> None:
    assert list_l2_states(CPU, FAST) == ("hot",)
    assert list_l2_states(torch.device("cuda"), FAST) == ("cold", "hot")
    assert list_l2_states(torch.device("cuda"), TIMING_PLANS["cudal1"]) == ("hot",)


def test_beside_a_slow_call_a_fast_one_is_timed_for_a_part_of_it() -> None:
    assert batch_for(FAST, "hot", (make_costs(1e6), make_costs(20_000.0))).calls == (1, 3)


def test_calls_that_a_gpu_began_with_before_all_were_queued_are_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[int] = []
    leads: list[float] = []

    def begin() -> Call:
        starts.append(1)
        return lambda: None

    def time_queue(
        run: Call, calls: int, device: torch.device, sink: object, lead_us: float
    ) -> tuple[float, float, bool]:
        leads.append(lead_us)
        return 1_000.0, 10.0 * len(leads), len(leads) < 3

    monkeypatch.setattr(timing, "_time_queue", time_queue)
    queued_time = timing.time_queued_calls(begin, 10, CPU, deque(), 50.0)
    assert leads == pytest.approx([600.0, 1_440.0, 1_728.0])
    assert len(starts) == 3, "each time from the same beginning"
    assert (queued_time.spent_us, queued_time.host_us) == (30.0, 100.0)
