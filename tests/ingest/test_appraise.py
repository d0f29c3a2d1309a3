"""Completions become measurements on record: each sample once, each program when it is due, and
nothing is invented for an evaluator that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.training.world import TASKS, SyntheticCodec, SyntheticEvaluator
from torch_cudal1.ingest.llm.appraise import Appraiser, NamedCompletion
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.judge.pool.judge_evaluator import MeasurementMemory
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask

TASK = TASKS[0]


def make_appraiser(evaluator: Any, database: Database | None = None) -> Appraiser:
    return Appraiser(SyntheticCodec(), evaluator, Database(None) if database is None else database)


def complete(
    *completions: str, prefix: str = "s", task: TrainingTask = TASK
) -> list[NamedCompletion]:
    return [
        NamedCompletion(f"{prefix}{number}", task, completion, "rules", ("digest",))
        for number, completion in enumerate(completions)
    ]


def test_measurements_come_in_the_order_of_the_completions_and_are_on_record() -> None:
    evaluator = SyntheticEvaluator()
    appraiser = make_appraiser(evaluator)
    completions = [
        *complete("a1 b1", "no program", "a0 b2"),
        *complete("a1 b1", prefix="t", task=TASKS[1]),
    ]
    measurements = appraiser.appraise(completions)
    assert [measured.outcome for measured in measurements] == ["ok", "undecodable", "wrong", "ok"]
    assert [measured.score for measured in measurements] == [1.5, None, None, 2.0]
    assert "expected a word of each kind" in measurements[1].detail
    assert [measured.task for measured in measurements] == [*[TASK.id] * 3, TASKS[1].id]
    for completion, measured in zip(completions, measurements, strict=True):
        sample = appraiser.database.get(completion.name)
        assert sample is not None
        assert (sample.measured, sample.origin, sample.exemplars) == (
            measured,
            "rules",
            ("digest",),
        )


def test_a_program_that_comes_twice_in_a_batch_is_measured_once() -> None:
    evaluator = SyntheticEvaluator()
    first, second = make_appraiser(evaluator).appraise(complete("a1 b1", "a1 b1"))
    assert evaluator.asked == [(TASK.id, "a1 b1")]
    assert first.score == second.score == 1.5
    # Buckets are runs of one measurement: one of the samples had none of its own.
    assert sorted(len(measured.buckets) for measured in (first, second)) == [0, 7]


def test_a_sample_on_record_is_answered_without_its_evaluator(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with Database(path) as database:
        before = make_appraiser(SyntheticEvaluator(), database).appraise(complete("a1 b1", "x"))
    evaluator = SyntheticEvaluator()
    with Database(path) as database:
        assert make_appraiser(evaluator, database).appraise(complete("a1 b1", "x")) == before
        assert evaluator.asked == []
        # Another sample of a program with one earlier coming is due for its second measurement.
        make_appraiser(evaluator, database).appraise(complete("a1 b1", prefix="later"))
    assert evaluator.asked == [(TASK.id, "a1 b1")]


def test_a_wrong_program_is_never_measured_again() -> None:
    evaluator = SyntheticEvaluator()
    appraiser = make_appraiser(evaluator)
    for prefix in "uvw":
        (measured,) = appraiser.appraise(complete("a0 b2", prefix=prefix))
        assert measured.outcome == "wrong"
    assert evaluator.asked == [(TASK.id, "a0 b2")]


def test_what_was_measured_before_a_kill_is_on_record_where_measurements_are_reported() -> None:
    class Reporting(SyntheticEvaluator):
        on_measurement: Callable[[Measured], None]

        def measure_all(self, questions: Sequence[tuple[TrainingTask, Sequence[Decoded]]]) -> Any:
            for task, programs in questions:
                for program in programs:
                    self.on_measurement(self.measure(task, [program])[0])
            raise AssertionError("it is killed before")

    appraiser = make_appraiser(Reporting(dies_after=2))
    completions = complete("a1 b1", "a2 b1", "a3 b1")
    with pytest.raises(KeyboardInterrupt):
        appraiser.appraise(completions)
    assert [appraiser.database.has(each.name) for each in completions] == [True, True, False]


def test_an_evaluator_that_answers_too_few_is_an_error_and_nothing_is_made_up() -> None:
    class Short(SyntheticEvaluator):
        def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
            return super().measure(task, programs)[1:]

    appraiser = make_appraiser(Short())
    with pytest.raises(ValueError, match="1 measurements for 2 programs"):
        appraiser.appraise(complete("a1 b1", "a2 b1"))
    assert len(appraiser.database) == 0


def test_an_evaluator_with_a_memory_learns_the_scores_of_the_database() -> None:
    class Remembering(SyntheticEvaluator):
        memory: MeasurementMemory

    database = Database(None)
    make_appraiser(SyntheticEvaluator(), database).appraise(complete("a1 b1", "a2 b1", "x"))
    evaluator = Remembering()
    evaluator.memory = MeasurementMemory()
    appraiser = make_appraiser(evaluator, database)
    assert evaluator.memory.best(TASK.id) == appraiser.memory.best(TASK.id) == 2.0
