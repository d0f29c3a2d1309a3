"""Calls on values that never came before, beside calls on those that were timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from torch_cudal1.judge.benchmark.unseen_inputs import check_unseen_inputs
from torch_cudal1.judge.sandbox.child import CandidateFailure


class Answering:
    """Stands in for the child: microseconds of both batches, round after round."""

    def __init__(self, rounds: list[tuple[float, float]], calls: int = 4) -> None:
        self._rounds: Iterator[tuple[float, float]] = iter(rounds)
        self.calls, self.asked = calls, 0

    def call(self, verb: str, **_: Any) -> dict[str, Any]:
        assert verb == "unseen"
        self.asked += 1
        familiar_us, unseen_us = next(self._rounds)
        return {"familiar_us": familiar_us, "unseen_us": unseen_us, "calls": self.calls}


def check(rounds: list[tuple[float, float]], calls: int = 4) -> tuple[Any, int]:
    child: Any = Answering(rounds, calls)
    return check_unseen_inputs(child, "candidate", ["a", "b"]), child.asked


def test_remembered_results_are_refused() -> None:
    result, asked = check([(40.0, 400.0)] * 30)
    assert not result.passed
    assert result.value == pytest.approx(10.0)
    assert "takes too long: 100 us, on others 10 us" in result.detail
    assert asked == 24


def test_an_honest_candidate_is_done_after_a_few_rounds() -> None:
    result, asked = check([(400.0, 404.0)] * 20)
    assert result.passed
    assert asked == 6


def test_slow_calls_are_asked_about_in_fewer_rounds() -> None:
    result, asked = check([(4e5, 4.04e5)] * 20)
    assert result.passed
    assert asked == 3


def test_one_round_by_chance_proves_nothing_either_way() -> None:
    # A busy machine: three of four rounds look like memory, one in four does not.
    noisy = [(100.0, 900.0), (100.0, 900.0), (100.0, 900.0), (800.0, 100.0)] * 6
    assert check(noisy)[0].passed
    assert not check([(900.0, 100.0), *[(100.0, 900.0)] * 23])[0].passed


def test_familiar_calls_that_are_delayed_hide_no_memory() -> None:
    # Every second round of a busy machine. Two such rounds were enough to get in.
    assert not check([(900.0, 600.0), (100.0, 600.0)] * 12)[0].passed


def test_a_microsecond_more_is_no_memory() -> None:
    assert check([(4.0, 9.0)] * 20)[0].passed


def test_inputs_that_cannot_be_changed_are_not_asked_about() -> None:
    result, asked = check([(1.0, 1.0)], calls=0)
    assert result.passed
    assert result.detail.startswith("not applicable")
    assert asked == 1


@pytest.mark.parametrize("answer", [{}, {"calls": "many"}, {"calls": 1, "familiar_us": 1.0}])
def test_an_answer_without_times_is_a_failure_of_the_protocol(answer: dict[str, Any]) -> None:
    child: Any = Answering([])
    child.call = lambda *_, **__: answer
    with pytest.raises(CandidateFailure) as caught:
        check_unseen_inputs(child, "candidate", ["a"])
    assert caught.value.detector == "protocol"
