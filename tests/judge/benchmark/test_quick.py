"""The quick benchmark, with scripted processes, so that the truth is known."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from torch_cudal1.judge.benchmark.candidate_timing import OutputAudit
from torch_cudal1.judge.benchmark.cross_process import ChildBatchTimer, TimedBatch
from torch_cudal1.judge.benchmark.protocol import measure
from torch_cudal1.judge.benchmark.quick import (
    QuickBenchmark,
    _check_child_clock,
    _measure_call_cost,
    _SettledCosts,
)
from torch_cudal1.judge.benchmark.timing_plan import BUCKETS, TIMING_PLANS
from torch_cudal1.judge.sandbox.child import CandidateFailure

TRAIN = TIMING_PLANS["train"]


@dataclass
class Machine:
    """A process whose calls take `call_us`, behind requests of `request_us`; it claims `lie` times
    the truth.
    """

    call_us: float
    request_us: float = 300.0
    lie: float = 1.0
    max_calls: int = 5_000
    sets: tuple[str, ...] = ()
    slot: str = ""
    keep: bool = True
    start: int = 0
    shift: int = 0
    drops_inline: bool = True
    queued: bool = False
    held_outputs: int = 0
    child: object = field(default_factory=object)
    batches: list[int] = field(default_factory=list)

    def time_batch(self, calls: int) -> TimedBatch:
        self.batches.append(calls)
        self.held_outputs = calls if self.keep else 0
        spent = calls * self.call_us
        return TimedBatch((self.request_us + spent) / 1e6, spent * self.lie, calls)


@dataclass
class CountedChecks:
    held_counts: list[int] = field(default_factory=list)

    def is_due(self) -> bool:
        return True

    def shift(self) -> int:
        return 1

    def check_output(self, start: int, shift: int, count: int) -> None:
        self.held_counts.append(count)


def make_benchmark(baseline: Machine, candidate: Machine) -> tuple[QuickBenchmark, CountedChecks]:
    checks = CountedChecks()
    return QuickBenchmark(
        cast(ChildBatchTimer, baseline), cast(ChildBatchTimer, candidate), cast(OutputAudit, checks)
    ), checks


def check_clock(machine: Machine) -> Any:
    return _check_child_clock(cast(ChildBatchTimer, machine), machine.call_us * machine.lie)


def test_a_quick_benchmark_measures_the_ratio_of_two_processes_whatever_a_request_costs() -> None:
    measurement = measure(
        make_benchmark(Machine(12.0, request_us=1_000.0), Machine(10.0, request_us=50.0))[0], TRAIN
    )
    assert measurement.summary.speedup == pytest.approx(1.2)
    assert measurement.steady
    assert len(measurement.summary.means) == BUCKETS


def test_samples_are_as_short_as_the_plan_says() -> None:
    candidate = Machine(10.0)
    measure(make_benchmark(Machine(10.0), candidate)[0], TRAIN)
    assert max(candidate.batches[-TRAIN.pairs * BUCKETS :]) == math.ceil(TRAIN.sample_us / 10.0)


def test_outputs_of_some_buckets_are_checked_and_which_ones_is_drawn_anew() -> None:
    drawn_buckets = set()
    for _ in range(30):
        sampler, checks = make_benchmark(Machine(10.0), Machine(10.0))
        drawn_buckets.add(frozenset(sampler.checked_buckets))
        measure(sampler, TRAIN)
        assert len(checks.held_counts) == 2
        assert all(checks.held_counts)
    assert len(drawn_buckets) > 5


def test_two_own_programs_in_one_process_are_checked_after_the_benchmark() -> None:
    class PairChild:
        """A child that answers requests for pairs."""

        requests = 0

        def call(self, verb: str, **request: Any) -> dict[str, Any]:
            assert verb == "pairs"
            self.requests += 1
            time.sleep(1e-3)
            return {"pairs": [[12.0, 10.0]] * len(request["leads"]), "start": 7}

    child = PairChild()
    sampler, checks = make_benchmark(Machine(12.0, child=child), Machine(10.0, child=child))
    plan = replace(TRAIN, pairs=2, side_us=20.0)
    assert measure(sampler, plan).summary.speedup == pytest.approx(1.2)
    assert child.requests == 1, "all buckets at once: all other slots wait meanwhile"
    assert not checks.held_counts
    sampler.check_last_outputs()
    assert len(checks.held_counts) == 2
    assert sampler.candidate.start == 7


@pytest.mark.parametrize("later_us", [2.5, 10.0, 1e4])
def test_the_cost_of_a_call_is_known_after_one_batch_where_the_first_calls_showed_it(
    later_us: float,
) -> None:
    candidate = Machine(10.0)
    warm = _measure_call_cost(cast(ChildBatchTimer, candidate), _SettledCosts(100.0, later_us))
    assert warm.call_us == pytest.approx(10.0)
    assert warm.first_us == 100.0
    assert sum(candidate.batches) * 10.0 >= 1_000.0
    assert len(candidate.batches) == (1 if later_us <= 10.0 else 8), candidate.batches


@pytest.mark.parametrize("lie", [0.1, 0.5, 0.8])
def test_a_clock_that_reports_less_than_passed_fails_its_check(lie: float) -> None:
    assert not check_clock(Machine(50.0, lie=lie)).passed
    assert check_clock(Machine(50.0)).passed


def test_a_batch_that_took_no_time_or_longer_than_its_request_is_refused() -> None:
    for lie in (0.0, -1.0, 1e3):
        with pytest.raises(CandidateFailure, match="us told of a request"):
            make_benchmark(Machine(10.0), replace(Machine(10.0), lie=lie))[0]._measure_cost_us(1, 5)
