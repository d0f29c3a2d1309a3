"""Decisions are pure: the margin, the saving, ties."""

from __future__ import annotations

import pytest

from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Accepted, CheckResult, Rejected, Timing, Verdict
from torch_cudal1.judge.benchmark.quoted_speedup import round_towards_one
from torch_cudal1.judge.evaluate.decide import PAPER_SUCCESS, choose_baseline, decide, is_surprising

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


def test_an_interval_that_says_nothing_is_the_machines_fault() -> None:
    wide = Timing(RIGHT, "eager", 1.3, 62.0, speedup=46.53, low=0.157, high=60.0, pairs=56)
    decision = decide(RIGHT, wide, Settings())
    assert isinstance(decision, Rejected)
    assert decision.reason.startswith("the machine was too busy to tell")
    assert "between 0.157 and 60.000 in 56 pairs" in decision.reason
    narrow = Timing(RIGHT, "eager", 1.0, 1.0, speedup=1.03, low=1.02, high=1.04, pairs=56)
    decision = decide(RIGHT, narrow, Settings())
    assert isinstance(decision, Rejected)
    assert decision.reason == ("speed-up over eager is 1.030, at least 1.020; a swap needs 1.05")


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
