"""Seconds of steps add up, whatever a step raises."""

from __future__ import annotations

import time

import pytest

from torch_cudal1.judge.pool.stopwatch import Stopwatch


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """Reads a clock that passes one second at each reading."""
    readings = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(readings)))
    return Stopwatch()


def test_runs_of_one_step_add_up_apart_from_other_steps(stopwatch: Stopwatch) -> None:
    for name in ("load", "timing", "load"):
        with stopwatch.step(name):
            pass
    assert stopwatch.seconds == {"load": 2.0, "timing": 1.0}


def test_a_step_inside_another_counts_in_both(stopwatch: Stopwatch) -> None:
    with stopwatch.step("outer"), stopwatch.step("inner"):
        pass
    assert stopwatch.seconds == {"inner": 1.0, "outer": 3.0}


def test_a_step_that_raises_is_counted(stopwatch: Stopwatch) -> None:
    with pytest.raises(RuntimeError, match="of the body"), stopwatch.step("load"):
        raise RuntimeError("of the body")
    assert stopwatch.seconds == {"load": 1.0}


def test_moved_seconds_leave_the_sum_as_it_is() -> None:
    stopwatch = Stopwatch({"timing": 5.0})
    stopwatch.move("timing", "wait", 2.0)
    stopwatch.move("timing", "wait", 1.0)
    assert stopwatch.seconds == {"timing": 2.0, "wait": 3.0}
