"""Decisions are pure: rounding towards 1, the margin, the saving, ties."""

from __future__ import annotations

import pytest

from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Accepted, CheckResult, Rejected, Timing, Verdict
from torch_cudal1.judge.benchmark.statistics import PairedSummary
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS, TimingProfile
from torch_cudal1.judge.evaluate.decide import (
    PAPER_SUCCESS,
    Unstable,
    choose_baseline,
    decide,
    is_surprising,
    round_towards_one,
    score_by_paper,
    score_measurement,
)

RIGHT = Verdict((CheckResult("numerics", True, 1.0, 2.0),))


def timing(low: float = 1.2, saved_us: float = 20.0) -> Timing:
    return Timing(
        RIGHT,
        "eager",
        candidate_us=100.0,
        baseline_us=100.0 + saved_us,
        speedup=max(low, 1.3),
        low=low,
        high=2.0,
        pairs=56,
    )


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


def test_a_right_and_faster_candidate_is_accepted() -> None:
    assert isinstance(decide(RIGHT, timing(), Settings()), Accepted)


@pytest.mark.parametrize(
    ("verdict", "timed", "detector"),
    [
        (RIGHT, timing(low=1.04), "timing"),
        (RIGHT, timing(saved_us=1.9), "timing"),
        (RIGHT, None, "timing"),
        (Verdict(()), None, "protocol"),
        (
            Verdict(
                (CheckResult("numerics", True), CheckResult("repeat", False, detail="bits differ"))
            ),
            None,
            "repeat",
        ),
    ],
)
def test_anything_less_is_rejected_by_name(
    verdict: Verdict, timed: Timing | None, detector: str
) -> None:
    decision = decide(verdict, timed, Settings())
    assert isinstance(decision, Rejected)
    assert decision.detector == detector
    assert decision.reason


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


@pytest.mark.parametrize(("profile", "found", "quoted"), SCORES)
def test_each_profile_quotes_its_own_number(
    profile: TimingProfile, found: PairedSummary, quoted: float
) -> None:
    assert score_measurement(found, TIMING_PLANS[profile]) == quoted


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


def test_the_paper_counts_a_speedup_above_one_percent() -> None:
    assert round_towards_one(1.0199) > PAPER_SUCCESS - 1e-9
    assert not round_towards_one(1.0199) > PAPER_SUCCESS


@pytest.mark.parametrize(
    ("quoted", "best", "again"),
    [
        (3.0, None, False),
        (3.01, None, True),
        (2.0, 1.0, False),
        (2.01, 1.0, True),
        (2.5, 2.0, False),
        (3.5, 3.4, True),
    ],
)
def test_a_jump_is_measured_again(quoted: float, best: float | None, again: bool) -> None:
    assert is_surprising(quoted, best) == again


def test_the_margin_is_the_users() -> None:
    assert isinstance(decide(RIGHT, timing(low=1.04), Settings(margin=1.03)), Accepted)


@pytest.mark.parametrize(
    ("medians", "best"),
    [
        ({"eager": 100.0, "inductor": 50.0}, "inductor"),
        ({"inductor": 99.0, "eager": 100.0}, "eager"),  # within 2 %: the simpler one
        ({"inductor+graph": 50.0, "inductor": 50.5, "eager": 90.0}, "inductor"),
        ({"eager": 100.0}, "eager"),
    ],
)
def test_the_fastest_baseline_wins_and_ties_go_to_the_simpler(
    medians: dict[str, float], best: str
) -> None:
    assert choose_baseline(medians) == best


def test_no_baseline_is_an_error() -> None:
    with pytest.raises(ValueError, match="eager"):
        choose_baseline({})


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
