"""Decisions are pure: rounding towards 1, the margin, the saving, ties."""

from __future__ import annotations

import pytest

from torch_cudal1.judge.decide import choose_baseline, conservative, decide
from torch_cudal1.records import Accepted, Check, Rejected, Timing, Verdict
from torch_cudal1.settings import Settings

RIGHT = Verdict((Check("numerics", True, 1.0, 2.0),))


def timing(low: float = 1.2, saved_us: float = 20.0) -> Timing:
    return Timing(
        RIGHT, "eager", candidate_us=100.0, baseline_us=100.0 + saved_us, speedup=max(low, 1.3), low=low, high=2.0, pairs=56
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
    assert conservative(speedup) == rounded


def test_a_right_and_faster_candidate_is_accepted() -> None:
    assert isinstance(decide(RIGHT, timing(), Settings()), Accepted)


@pytest.mark.parametrize(
    ("verdict", "timed", "detector"),
    [
        (RIGHT, timing(low=1.04), "timing"),
        (RIGHT, timing(saved_us=1.9), "timing"),
        (RIGHT, None, "timing"),
        (Verdict(()), None, "protocol"),
        (Verdict((Check("numerics", True), Check("repeat", False, detail="bits differ"))), None, "repeat"),
    ],
)
def test_anything_less_is_rejected_by_name(verdict: Verdict, timed: Timing | None, detector: str) -> None:
    decision = decide(verdict, timed, Settings())
    assert isinstance(decision, Rejected)
    assert decision.detector == detector
    assert decision.reason


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
def test_the_fastest_baseline_wins_and_ties_go_to_the_simpler(medians: dict[str, float], best: str) -> None:
    assert choose_baseline(medians) == best


def test_no_baseline_is_an_error() -> None:
    with pytest.raises(ValueError, match="eager"):
        choose_baseline({})
