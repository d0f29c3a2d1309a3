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


def take(
    speedup: float, profile: TimingProfile = "fast", *, noise: float = 0.001, failed: bool = False
) -> BenchmarkResult:
    draw = random.Random(round(speedup * 1e6))
    pairs = [(100.0 * speedup * draw.lognormvariate(0, noise), 100.0) for _ in range(56)]
    found = Measurement(TIMING_PLANS[profile], {"hot": summarise(pairs)}, (1.0, 1.0), 1, 0.1)
    return BenchmarkResult(found, (CheckResult("timed_output", not failed),), {})


class Again:
    """Hands out further takes and counts them."""

    def __init__(self, *speedups: float, profile: TimingProfile = "fast") -> None:
        self.left = [take(speedup, profile) for speedup in speedups]
        self.asked = 0

    def __call__(self) -> BenchmarkResult:
        self.asked += 1
        return self.left.pop(0)


def jump(found: BenchmarkResult) -> CheckResult | None:
    return next((check for check in found.checks if check.name == "jump"), None)


def test_an_ordinary_speedup_is_measured_once() -> None:
    again = Again()
    first = take(1.5)
    assert confirm_measurement(first, again, None) is first
    assert again.asked == 0


@pytest.mark.parametrize(
    ("first", "best", "others", "passed", "counts"),
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
        ),  # the first was disturbed: the two that agree are believed, the lowest counts
        (5.0, None, (4.0, 4.9), True, 4.0),
        (5.0, None, (4.0, 3.0), False, 3.0),  # no two agree
    ],
)
def test_a_jump_is_confirmed_or_refused(
    first: float, best: float | None, others: tuple[float, ...], passed: bool, counts: float
) -> None:
    again = Again(*others)
    found = confirm_measurement(take(first), again, best)
    assert again.asked == len(others)
    check = jump(found)
    assert check is not None
    assert check.passed == passed
    assert found.measurement.summary.speedup == pytest.approx(counts, rel=0.01)
    assert "the same device" in check.detail


def test_strict_measures_in_two_processes_and_the_lower_counts() -> None:
    again = Again(1.48, profile="strict")
    found = confirm_measurement(take(1.5, "strict"), again, None)
    assert again.asked == 1
    assert found.measurement.summary.speedup == pytest.approx(1.48, rel=0.01)


def test_a_take_that_fails_its_own_checks_fails_the_whole() -> None:
    found = confirm_measurement(take(5.0), lambda: take(5.0, failed=True), None)
    assert not all(check.passed for check in found.checks)


@pytest.mark.parametrize(
    "first", [take(5.0, failed=True), take(5.0, "standard", noise=2.0)], ids=["failed", "unstable"]
)
def test_what_has_no_score_is_not_measured_again(first: BenchmarkResult) -> None:
    refuse: Callable[[], BenchmarkResult] = Again()
    assert confirm_measurement(first, refuse, None) is first


def test_the_cpu_has_no_other_device() -> None:
    assert find_other_device(torch.device("cpu")) is None
