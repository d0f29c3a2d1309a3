"""A measurement has a score exactly where its outcome is "ok"."""

from __future__ import annotations

import math

import pytest

from torch_cudal1.judge.pool.measured import Measured, Outcome


def test_a_success_has_a_score_and_a_failure_has_none() -> None:
    assert Measured("task", "program", "ok", 1.5).score == 1.5
    assert Measured("task", "program", "wrong", detail="numerics: off").score is None


@pytest.mark.parametrize(
    ("outcome", "score"), [("ok", None), ("wrong", 1.0), ("unstable", 2.0), ("hack", -1.0)]
)
def test_a_failure_with_a_score_and_a_success_without_one_cannot_be_built(
    outcome: Outcome, score: float | None
) -> None:
    with pytest.raises(ValueError, match="exactly where the outcome is 'ok'"):
        Measured("task", "program", outcome, score)


@pytest.mark.parametrize("score", [0.0, -1.0, math.inf, math.nan])
def test_a_score_that_is_no_finite_speedup_cannot_be_built(score: float) -> None:
    with pytest.raises(ValueError, match="a finite speed-up above 0"):
        Measured("task", "program", "ok", score)
