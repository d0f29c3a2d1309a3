"""Surprising speed-ups are measured again in fresh processes; what cannot be repeated is refused."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.benchmark.candidate_timing import BenchmarkResult
from torch_cudal1.judge.benchmark.protocol import Measurement
from torch_cudal1.judge.benchmark.statistics import summarise
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS, TimingProfile
from torch_cudal1.judge.evaluate.confirm import confirm_measurement, find_other_device


def make_result(
    speedup: float, profile: TimingProfile = "fast", *, noise: float = 0.001, failed: bool = False
) -> BenchmarkResult:
    draw = random.Random(round(speedup * 1e6))
    pairs = [(100.0 * speedup * draw.lognormvariate(0, noise), 100.0) for _ in range(56)]
    result = Measurement(TIMING_PLANS[profile], {"hot": summarise(pairs)}, (1.0, 1.0), 1, 0.1)
    return BenchmarkResult(result, (CheckResult("timed_output", not failed),), {})


class ScriptedRuns:
    """Hands out further results and counts them."""

    def __init__(self, *speedups: float, profile: TimingProfile = "fast") -> None:
        self.results = [make_result(speedup, profile) for speedup in speedups]
        self.count = 0

    def __call__(self) -> BenchmarkResult:
        self.count += 1
        return self.results.pop(0)


def find_jump(result: BenchmarkResult) -> CheckResult | None:
    return next((check for check in result.checks if check.name == "jump"), None)


def test_an_ordinary_speedup_is_measured_once() -> None:
    run_again = ScriptedRuns()
    first = make_result(1.5)
    assert confirm_measurement(first, run_again, None) is first
    assert run_again.count == 0


@pytest.mark.parametrize("second", [1.6, 0.8])
def test_a_gain_of_which_the_buckets_disagree_is_measured_again_and_the_lower_counts(
    second: float,
) -> None:
    draw = random.Random(3)
    levels = (2.6, 2.5, 1.4, 2.7, 1.3, 2.6, 1.5)
    pairs = [
        (100.0 * level * draw.lognormvariate(0, 0.001), 100.0) for level in levels for _ in range(8)
    ]
    noisy = Measurement(TIMING_PLANS["fast"], {"hot": summarise(pairs)}, (1.0, 1.0), 1, 0.1)
    assert not noisy.summary.steady
    assert noisy.summary.low > 1
    run_again = ScriptedRuns(second, second)
    first = BenchmarkResult(noisy, (CheckResult("timed_output", True),), {})
    confirmed = confirm_measurement(first, run_again, None)
    # 1.6 is within the first one's interval, 0.8 is asked for a third time.
    assert run_again.count == (1 if second > 1 else 2)
    assert confirmed.measurement.summary.low == pytest.approx(min(second, 1.3), rel=0.01)
    jump = find_jump(confirmed)
    assert jump is not None
    assert jump.passed
    # Noise is no matter of processes: where the first one can measure again, no other starts.
    run_again, repeat = ScriptedRuns(), ScriptedRuns(second, second)
    repeated = confirm_measurement(first, run_again, None, repeat=repeat)
    assert (run_again.count, repeat.count) == (0, 1 if second > 1 else 2)
    assert repeated.measurement.summary.low == confirmed.measurement.summary.low


@pytest.mark.parametrize(
    ("first", "best", "later_speedups", "passed", "expected"),
    [
        (5.0, None, (5.2,), True, 5.0),
        (5.2, None, (5.0,), True, 5.0),  # the lower one counts
        (2.5, 1.0, (2.4,), True, 2.4),  # above twice the best so far
        (
            5.0,
            None,
            (1.0, 1.0),
            True,
            1.0,
        ),  # the first was disturbed: of the two that agree the lower counts
        (5.0, None, (4.0, 4.9), True, 4.0),
        (5.0, None, (4.0, 3.0), False, 3.0),  # no two agree
    ],
)
def test_a_jump_is_confirmed_or_refused(
    first: float,
    best: float | None,
    later_speedups: tuple[float, ...],
    passed: bool,
    expected: float,
) -> None:
    run_again = ScriptedRuns(*later_speedups)
    result = confirm_measurement(make_result(first), run_again, best)
    assert run_again.count == len(later_speedups)
    check = find_jump(result)
    assert check is not None
    assert check.passed == passed
    assert result.measurement.summary.speedup == pytest.approx(expected, rel=0.01)
    assert "the same device" in check.detail


def test_a_surprise_is_measured_in_another_process_though_the_first_one_could() -> None:
    run_again, repeat = ScriptedRuns(5.2), ScriptedRuns()
    confirm_measurement(make_result(5.0), run_again, None, repeat=repeat)
    assert (run_again.count, repeat.count) == (1, 0)


def test_strict_measures_in_two_processes_and_the_lower_counts() -> None:
    run_again, repeat = ScriptedRuns(1.48, profile="strict"), ScriptedRuns()
    result = confirm_measurement(make_result(1.5, "strict"), run_again, None, repeat=repeat)
    assert (run_again.count, repeat.count) == (1, 0)
    assert result.measurement.summary.speedup == pytest.approx(1.48, rel=0.01)


def test_a_second_run_that_fails_its_checks_fails_the_measurement() -> None:
    result = confirm_measurement(make_result(5.0), lambda: make_result(5.0, failed=True), None)
    assert not all(check.passed for check in result.checks)


@pytest.mark.parametrize(
    "first",
    [make_result(5.0, failed=True), make_result(5.0, "standard", noise=2.0)],
    ids=["failed", "unstable"],
)
def test_a_run_without_a_score_is_not_measured_again(first: BenchmarkResult) -> None:
    refuse: Callable[[], BenchmarkResult] = ScriptedRuns()
    assert confirm_measurement(first, refuse, None) is first


def test_the_cpu_has_no_other_device() -> None:
    assert find_other_device(torch.device("cpu")) is None
