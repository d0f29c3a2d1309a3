"""A survey of all programs: what it measures, in which order, and what it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.training.landscape_cases import CODEC, CPU, RIGHT, TASK, CountingEvaluator, program
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.pool.judge_evaluator import JudgeEvaluator
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.training.ksl.grammar import HACKS
from torch_cudal1.training.ksl.ops import make_task
from torch_cudal1.training.landscape.landscape_file import LandscapeError
from torch_cudal1.training.landscape.naive_pool import NaivePool
from torch_cudal1.training.landscape.survey import (
    Survey,
    SurveyProgress,
    read_rows,
    select_complete_tasks,
)

OTHER = make_task("diag_left", (19, 40))


WRONG = (
    "tpl=pool.shifts rows=4 fuse=full mask=off acc=f32",
    "tpl=pool.shifts rows=64 fuse=inplace mask=on acc=f16",
    "tpl=pool.unfold acc=f16",
)


class Silent(NaivePool):
    """Starts no process."""

    def __init__(self) -> None:
        super().__init__(CPU)

    def speedup(self, task: TrainingTask, program: Decoded) -> float | None:
        return None


def run_survey(folder: Path, judge: CountingEvaluator) -> list[SurveyProgress]:
    progress: list[SurveyProgress] = []
    Survey(folder, CODEC, judge, Silent(), batch=8).run(
        [TASK, OTHER], budget_s=60, report=progress.append
    )
    return progress


def test_a_survey_that_was_stopped_goes_on_without_measuring_anything_twice(tmp_path: Path) -> None:
    first, second = CountingEvaluator(dies_after=20), CountingEvaluator()
    with pytest.raises(SandboxError):
        run_survey(tmp_path, first)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"key": "cut sho')  # the line that a kill cut off
    progress = run_survey(tmp_path, second)
    rows = read_rows(tmp_path)
    assert set(select_complete_tasks(CODEC, [TASK, OTHER], rows)) == {TASK.id, OTHER.id}
    assert (
        progress[-1].rows
        == sum(map(len, rows.values()))
        == len(CODEC.programs(TASK)) + len(CODEC.programs(OTHER))
    )
    assert set(second.asked.values()) == {1}
    assert sum(second.asked.values()) == progress[-1].rows - 20, (
        "everything that was measured was on the disk"
    )


def test_a_trusting_evaluator_is_asked_about_what_was_refused_and_about_nothing_else(
    tmp_path: Path,
) -> None:
    class Believing(Silent):
        def speedup(self, task: TrainingTask, program: Decoded) -> float | None:
            return 7.0

    with Believing() as naive:
        Survey(tmp_path, CODEC, CountingEvaluator(refuses="acc=f16"), naive, batch=8).run(
            [TASK, OTHER], budget_s=60, report=lambda _: None
        )
    rows = [row for listed in read_rows(tmp_path).values() for row in listed]
    assert len(rows) == len(CODEC.programs(TASK)) + len(CODEC.programs(OTHER))
    assert {(row.outcome, row.naive) for row in rows} == {("ok", None), ("wrong", 7.0)}


def test_a_batch_ends_one_task_and_begins_the_next(tmp_path: Path) -> None:
    sizes: list[list[int]] = []

    class Noting(CountingEvaluator):
        def measure_all(
            self, questions: Sequence[tuple[TrainingTask, list[Decoded]]]
        ) -> list[list[Measured]]:
            sizes.append([len(programs) for _, programs in questions])
            return super().measure_all(questions)

    every = len(CODEC.programs(TASK)) + len(CODEC.programs(OTHER))
    Survey(tmp_path, CODEC, Noting(), Silent(), batch=every - 1).run(
        [TASK, OTHER], budget_s=60, report=lambda _: None
    )
    first = 16
    assert sizes == [[first], [len(CODEC.programs(TASK)) - first, len(CODEC.programs(OTHER))]]


def test_no_batch_is_begun_after_the_time_is_up(tmp_path: Path) -> None:
    judge = CountingEvaluator()
    assert (
        Survey(tmp_path, CODEC, judge, Silent()).run(
            [TASK], budget_s=0, report=lambda progress: None
        )
        == 0
    )
    assert not judge.asked


def test_a_machine_on_which_nothing_runs_is_reported_at_once_and_no_row_is_written(
    tmp_path: Path,
) -> None:
    class Broken(CountingEvaluator):
        def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
            return [
                Measured(task.id, program.program, "run", detail="run: no compiler")
                for program in programs
            ]

    with pytest.raises(LandscapeError, match="no compiler"):
        run_survey(tmp_path, Broken())
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgeEvaluator]:
    terms = MeasurementSettings(
        Settings(),
        Contract(assume_finite=True),
        CPU,
        tmp_path_factory.mktemp("locks"),
        rule="cudal1",
        trust="own",
    )
    with JudgeEvaluator(terms) as evaluator:
        yield evaluator


def test_programs_that_are_meant_to_be_wrong_are_refused_by_the_judge(
    judge: JudgeEvaluator,
) -> None:
    measurements = judge.measure(TASK, [program(TASK, text) for text in WRONG])
    assert [measured.outcome for measured in measurements] == ["wrong"] * len(WRONG), measurements


def test_a_right_program_is_refused_for_nothing_but_its_time(judge: JudgeEvaluator) -> None:
    (measured,) = judge.measure(TASK, [program(TASK, RIGHT)])
    noise = ("unstable", "wall_slope", "jump", "timing")
    assert measured.outcome == "ok" or measured.detail.startswith(noise), measured


def test_every_cheat_is_refused_by_the_judge(judge: JudgeEvaluator) -> None:
    measurements = judge.measure(
        TASK, [program(TASK, f"tpl=pool.shifts hack={name}") for name in HACKS]
    )
    assert not [measured for measured in measurements if measured.outcome == "ok"]
    about_time = [measured for measured in measurements if measured.outcome == "unstable"]
    assert not about_time, "a cheat is refused for what it does"
