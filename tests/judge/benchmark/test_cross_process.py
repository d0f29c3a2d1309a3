"""Two processes on one clock, with scripted processes, so that the truth is known."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from torch_cudal1.judge.benchmark.cross_process import (
    ChildBatchTimer,
    CrossProcessBenchmark,
    TimedBatch,
    TwoPointSlope,
    check_wall_slope,
    limit_batch_calls,
    measure_slope,
)
from torch_cudal1.judge.benchmark.protocol import measure
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS
from torch_cudal1.judge.sandbox.child import CandidateFailure

FAST = TIMING_PLANS["fast"]


@dataclass
class Machine:
    """A process whose calls take `call_us`, behind requests of `request_us`; it claims `lie` times
    the truth.
    """

    call_us: float
    request_us: float = 300.0
    lie: float = 1.0
    max_calls: int = 5_000
    batches: list[int] = field(default_factory=list)

    def time_batch(self, calls: int) -> TimedBatch:
        self.batches.append(calls)
        assert calls <= self.max_calls
        spent = calls * self.call_us
        return TimedBatch((self.request_us + spent) / 1e6, spent * self.lie, calls)


def test_the_slope_is_free_of_the_cost_of_a_request() -> None:
    measurement = measure_slope(Machine(50.0, request_us=10_000.0), 10)
    assert measurement.wall_us == pytest.approx(50.0)
    assert measurement.claimed_us == pytest.approx(50.0)
    assert measurement.mean_us == pytest.approx(550.0)


def test_a_benchmark_measures_the_ratio_of_two_processes() -> None:
    benchmark = CrossProcessBenchmark(Machine(120.0), Machine(100.0, request_us=50.0))
    measurement = measure(benchmark, FAST)
    assert measurement.summary.speedup == pytest.approx(1.2)
    assert measurement.steady
    assert benchmark.check().passed
    assert measurement.first_call_us == (pytest.approx(420.0), pytest.approx(150.0))


def test_batches_outlast_the_jitter_of_a_request() -> None:
    quick = Machine(2.0)
    measure(CrossProcessBenchmark(Machine(2.0), quick), replace(FAST, side_us=80.0))
    long = [
        calls for calls in quick.batches if calls * quick.call_us >= 6_500
    ]  # from a cost that holds a part of the request's
    assert len(long) == 56  # the others are short ones, from which the cost of a request is known


def test_a_delay_while_warming_up_makes_no_batch_short() -> None:
    class Delayed(Machine):
        def time_batch(self, calls: int) -> TimedBatch:
            spun = super().time_batch(calls)
            return replace(
                spun, wall_s=spun.wall_s + (0.02 if len(self.batches) in (5, 9, 13) else 0.0)
            )

    sides = Delayed(100.0), Delayed(100.0)
    measure(CrossProcessBenchmark(*sides), FAST)
    assert all(
        sorted(side.batches[-112:])[56] >= 49 for side in sides
    )  # half of them are long: 7 ms, less what a request costs


@pytest.mark.parametrize(
    ("call_us", "shared"), [(60.0, True), (130.0, True), (30.0, False), (900.0, False)]
)
def test_sides_that_are_not_far_apart_run_as_many_calls(call_us: float, shared: bool) -> None:
    """What a batch keeps makes a call the dearer the longer it is."""
    sides = Machine(100.0), Machine(call_us)
    measure(CrossProcessBenchmark(*sides), FAST)
    assert (max(sides[0].batches[-20:]) == max(sides[1].batches[-20:])) is shared


def test_short_batches_made_slow_gain_nothing() -> None:
    class Sly(Machine):
        def time_batch(self, calls: int) -> TimedBatch:
            spun = super().time_batch(calls)
            return replace(
                spun, wall_s=spun.wall_s + (0.002 if calls * self.call_us < 2_500 else 0.0)
            )

    measurement = measure(CrossProcessBenchmark(Machine(100.0), Sly(100.0)), FAST)
    assert measurement.summary.speedup == pytest.approx(1.0)


def test_one_slow_short_batch_in_three_changes_nothing() -> None:
    class Disturbed(Machine):
        def time_batch(self, calls: int) -> TimedBatch:
            spun = super().time_batch(calls)
            short = calls * self.call_us < 2_500
            return replace(
                spun, wall_s=spun.wall_s + (0.002 if short and len(self.batches) % 3 == 0 else 0.0)
            )

    measurement = measure(CrossProcessBenchmark(Machine(100.0), Disturbed(100.0)), FAST)
    assert measurement.summary.speedup == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("lie", [0.1, 0.5, 0.85, 1.2])
def test_a_process_that_claims_another_time_is_refused_and_gains_nothing(lie: float) -> None:
    benchmark = CrossProcessBenchmark(Machine(100.0), Machine(100.0, lie=lie))
    measurement = measure(benchmark, FAST)
    assert measurement.summary.speedup == pytest.approx(1.0)
    check = benchmark.check()
    assert (check.name, check.passed) == ("wall_slope", False)
    assert check.value is not None
    assert check.limit is not None
    assert check.value > check.limit


@pytest.mark.parametrize(
    ("wall_us", "claimed_us", "passed"),
    [
        (100.0, 91.0, True),
        (100.0, 89.0, False),
        (10.0, 6.0, True),
        (10.0, 4.0, False),
        (3.0, 0.0, True),
        (100.0, 111.0, False),
    ],
)
def test_clocks_may_differ_by_a_tenth_or_five_microseconds(
    wall_us: float, claimed_us: float, passed: bool
) -> None:
    assert check_wall_slope([TwoPointSlope(wall_us, claimed_us, wall_us)]).passed == passed


def test_one_disturbed_batch_does_not_condemn() -> None:
    assert check_wall_slope(
        [
            TwoPointSlope(100.0, 100.0, 100.0),
            TwoPointSlope(-500.0, 900.0, 100.0),
            TwoPointSlope(101.0, 100.0, 100.0),
        ]
    ).passed


def test_noise_does_not_condemn_and_a_false_clock_in_noise_does() -> None:
    draw = random.Random(5)
    noise = [draw.gauss(0.0, 40.0) + draw.expovariate(1 / 30.0) for _ in range(56)]
    honest = [TwoPointSlope(30.0 + each, 30.0, 100.0) for each in noise]
    check = check_wall_slope(honest)
    assert check.value is not None
    assert check.limit is not None
    assert check.value > check.limit
    assert check.passed
    assert "the machine is busy" in check.detail
    assert not check_wall_slope([TwoPointSlope(130.0 + e, 30.0, 100.0) for e in noise]).passed
    assert not check_wall_slope([TwoPointSlope(30.0 + e, 160.0, 100.0) for e in noise]).passed


@pytest.mark.parametrize(("wall_us", "is_busy"), [(3.0, True), (95.0, False), (210.0, True)])
def test_a_slope_far_from_what_a_call_took_in_its_batch_is_called_noise(
    wall_us: float, is_busy: bool
) -> None:
    check = check_wall_slope([TwoPointSlope(wall_us, wall_us, 100.0)] * 7)
    assert check.passed
    assert ("the machine is busy" in check.detail) is is_busy


def test_batches_do_not_outgrow_the_memory_for_their_outputs() -> None:
    small = Machine(1.0, max_calls=10)
    measure(CrossProcessBenchmark(small, small), FAST)
    assert max(small.batches) <= 10


@pytest.mark.parametrize(
    ("output_bytes", "device", "calls"),
    [(1, "cpu", 5_000), (1 << 28, "cpu", 4), (1 << 40, "cpu", 2), (1 << 28, "cuda", 32)],
)
def test_how_many_outputs_are_kept(output_bytes: int, device: str, calls: int) -> None:
    assert limit_batch_calls(output_bytes, torch.device(device)) == calls


def test_a_machine_whose_clock_runs_backwards_is_too_busy_to_time() -> None:
    class Busy(Machine):
        def time_batch(self, calls: int) -> TimedBatch:
            return TimedBatch(1.0 / calls, 0.0, calls)

    benchmark = CrossProcessBenchmark(Busy(1.0), Busy(1.0))
    with pytest.raises(CandidateFailure, match="busy") as caught:
        measure(benchmark, FAST)
    assert caught.value.detector == "unstable"


class Script:
    """A child that sleeps for what it is asked and writes down the requests."""

    def __init__(self, answer: dict[str, Any] | None = None) -> None:
        self.answer = answer
        self.requests: list[tuple[str, dict[str, Any]]] = []

    def call(self, verb: str, *, deadline_s: float | None = None, **fields: Any) -> dict[str, Any]:
        self.requests.append((verb, fields))
        if verb == "spin":
            time.sleep(fields["calls"] * 1e-3)
        return {"elapsed_us": fields.get("calls", 0) * 1e3} if self.answer is None else self.answer


def test_a_batch_is_clocked_here_and_its_outputs_dropped_before_the_next() -> None:
    child = Script()
    spinner = ChildBatchTimer(child, "candidate", ["one", "two"])  # type: ignore[arg-type]
    spun = spinner.time_batch(20)
    assert 0.02 <= spun.wall_s < 1
    assert (spun.claimed_us, spinner.held_outputs) == (20_000.0, 20)
    spinner.time_batch(3)
    assert [verb for verb, _ in child.requests] == ["spin", "drop", "spin"]
    starts = [fields["start"] for verb, fields in child.requests if verb == "spin"]
    assert len(set(starts)) > 1


def test_the_ring_is_turned_outside_the_clock() -> None:
    child = Script()
    spinner = ChildBatchTimer(child, "candidate", ["one", "two"], keep=False)  # type: ignore[arg-type]
    spinner.time_batch(2)
    spinner.shift = 1
    spinner.time_batch(2)
    assert [(fields["calls"], fields["shift"]) for _, fields in child.requests] == [
        (2, 0),
        (1, 1),
        (2, 1),
    ]  # the first batch makes it


def test_an_answer_without_a_time_breaks_the_protocol() -> None:
    spinner = ChildBatchTimer(Script({"elapsed_us": "soon"}), "candidate", ["one"])  # type: ignore[arg-type]
    with pytest.raises(CandidateFailure) as caught:
        spinner.time_batch(1)
    assert caught.value.detector == "protocol"
