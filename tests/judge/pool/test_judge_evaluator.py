"""The evaluator remembers each program's measurements and decides when it is measured again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.judge.pool.scripted_slot import make_score
from tests.training.sources import TASK, program, source
from torch_cudal1.judge.pool.judge_evaluator import MeasurementMemory
from torch_cudal1.judge.pool.measured import Measured


def test_a_repeated_program_is_measured_at_its_first_second_fourth_and_eighth_occurrence() -> None:
    memory, due = MeasurementMemory(), []
    for occurrence in range(1, 17):
        if memory.select_due(TASK, [program("p", source())]):
            due.append(occurrence)
            memory.take(make_score(float(occurrence)))
    assert due == [1, 2, 4, 8, 16]
    assert memory.answer("relu", "p").score == 4.0
    assert memory.best("relu") == 16.0


def test_a_program_twice_in_a_batch_is_measured_once() -> None:
    assert len(MeasurementMemory().select_due(TASK, [program("p", source())] * 5)) == 1


@pytest.mark.parametrize("outcome", ["wrong", "hack", "compile", "run"])
def test_a_failure_is_not_tried_again_and_outweighs_earlier_scores(outcome: str) -> None:
    memory = MeasurementMemory()
    memory.select_due(TASK, [program("p", source())])
    memory.take(make_score(2.0))
    assert memory.select_due(TASK, [program("p", source())])
    memory.take(Measured("relu", "p", outcome))  # type: ignore[arg-type]
    assert not any(memory.select_due(TASK, [program("p", source())]) for _ in range(8))
    assert memory.answer("relu", "p").outcome == outcome


def test_an_unstable_measurement_is_forgotten_once_there_is_a_score() -> None:
    memory = MeasurementMemory()
    memory.select_due(TASK, [program("p", source())])
    memory.take(Measured("relu", "p", "unstable"))
    assert memory.answer("relu", "p").outcome == "unstable"
    assert memory.select_due(TASK, [program("p", source())])
    memory.take(make_score(1.25))
    assert memory.answer("relu", "p").score == 1.25


def test_a_known_measurement_is_not_repeated() -> None:
    memory = MeasurementMemory()
    memory.learn([make_score(2.0), replace(make_score(2.0), score=3.0)])
    assert not memory.select_due(TASK, [program("p", source())])
    assert memory.best("relu") == 3.0
