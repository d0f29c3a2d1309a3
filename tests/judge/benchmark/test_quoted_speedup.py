"""What is quoted for a measurement: two decimals rounded towards 1, by each profile's rule, or nothing
where buckets disagree.
"""

from __future__ import annotations

import pytest

from torch_cudal1.judge.benchmark.quoted_speedup import (
    Unstable,
    round_towards_one,
    score_by_paper,
    score_measurement,
)
from torch_cudal1.judge.benchmark.statistics import PairedSummary
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS, TimingProfile


@pytest.mark.parametrize(
    ("speedup", "rounded"),
    [
        (1.118, 1.11),
        (0.992, 1.00),
        (2.30, 2.30),
        (1.15, 1.15),
        (0.981, 0.99),
        (0.5, 0.5),
        (1.0, 1.0),
        (1.0099, 1.0),
        (3.009999, 3.0),
    ],
)
def test_a_speedup_is_rounded_towards_one(speedup: float, rounded: float) -> None:
    assert round_towards_one(speedup) == rounded


def summary(
    low: float, speedup: float, high: float, *, steady: bool = True, means: tuple[float, ...] = ()
) -> PairedSummary:
    return PairedSummary(
        speedup,
        low,
        high,
        100.0 * speedup,
        100.0,
        56,
        steady,
        (speedup,) * 7,
        means or (speedup,) * 7,
    )


SCORES: list[tuple[TimingProfile, PairedSummary, float]] = [
    ("fast", summary(1.118, 1.2, 1.3), 1.11),
    ("fast", summary(0.992, 1.2, 1.3), 1.0),
    (
        "fast",
        summary(0.9, 0.95, 1.1, steady=False),
        0.9,
    ),  # provisional: the range of the buckets is the interval
    ("standard", summary(1.118, 1.2, 1.3), 1.11),
    ("standard", summary(0.98, 1.2, 1.3), 1.0),  # the interval holds 1
    ("standard", summary(0.8, 0.85, 0.912), 0.92),  # slower: the bound nearest to 1
    ("strict", summary(2.30, 2.4, 2.5), 2.30),
    ("train", summary(1.0, 1.118, 1.3), 1.11),
    ("train", summary(0.9, 0.951, 1.3), 0.96),
    (
        "cudal1",
        summary(1.0, 9.0, 9.9, means=(1.118, 1.12, 1.1, 1.2, 1.118, 1.118, 1.2)),
        1.11,
    ),  # the median of the means alone
    (
        "cudal1",
        summary(0.9, 1.0, 1.1, steady=False),
        1.0,
    ),  # steadiness is not the paper's rule, its variance is
]


@pytest.mark.parametrize(("profile", "measured", "quoted"), SCORES)
def test_each_profile_quotes_its_own_number(
    profile: TimingProfile, measured: PairedSummary, quoted: float
) -> None:
    assert score_measurement(measured, TIMING_PLANS[profile]) == quoted


@pytest.mark.parametrize("profile", ["standard", "strict", "train"])
def test_buckets_that_disagree_have_no_score(profile: TimingProfile) -> None:
    answer = score_measurement(summary(1.5, 2.0, 2.5, steady=False), TIMING_PLANS[profile])
    assert isinstance(answer, Unstable)
    assert "disagree" in answer.reason


def test_the_papers_variance_is_absolute_so_high_speedups_must_be_steadier() -> None:
    spread = (0.97, 0.98, 0.99, 1.0, 1.01, 1.02, 1.03)
    assert score_measurement(summary(1, 1, 1, means=spread), TIMING_PLANS["cudal1"]) == 1.0
    answer = score_measurement(
        summary(50, 50, 50, means=tuple(50 * each for each in spread)), TIMING_PLANS["cudal1"]
    )
    assert isinstance(answer, Unstable)
    assert answer.value > answer.limit == 0.005


def test_the_relative_rule_asks_the_same_of_every_speedup() -> None:
    spread = (0.97, 0.98, 0.99, 1.0, 1.01, 1.02, 1.03)
    assert score_by_paper(spread, relative=True) == 1.0
    assert score_by_paper([50 * each for each in spread], relative=True) == 50.0
    assert isinstance(
        score_by_paper([50 * each for each in (0.8, 0.9, 1, 1, 1, 1.1, 1.2)], relative=True),
        Unstable,
    )


def test_every_number_of_two_decimals_stays_as_it_is() -> None:
    for cents in range(1, 5_000):
        assert round_towards_one(cents / 100) == cents / 100
