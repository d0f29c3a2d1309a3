"""A process that died says how; its task is tried again without the column that was at work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernelbench.job import PROFILES, Job
from benchmarks.kernelbench.task_runs import TaskRun
from benchmarks.kernelbench.tasks import Task

JOB = Job("cuda:0", PROFILES["quick"], arms=("only kernels",))
ABSENT: Any = None


def make_run(log: Path, stage: str, column: str = "", **lost: str) -> TaskRun:
    named = {name.replace("_", " "): reason for name, reason in lost.items()}
    task = Task(1, 1, "T", "source", "today")
    return TaskRun(task, ABSENT, ABSENT, log, False, named, 0.0, stage, column)


def test_a_process_without_a_row_is_described_by_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = make_run(log, "tune")
    log.write_text("")
    assert run.describe_exit(3) == "process ended with code 3 in 'tune': it wrote nothing"
    log.write_text("first\nlast\n")
    assert run.describe_exit(3).endswith("in 'tune': last")


def test_of_a_crash_the_reason_names_the_innermost_frame(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        'Fatal Python error: Segmentation fault\n  File "a.py", line 1 in f\n  File "b"\nend\n'
    )
    reason = make_run(log, "tune").describe_exit(-11)
    assert reason.endswith('Fatal Python error: Segmentation fault, File "a.py", line 1 in f')


@pytest.mark.parametrize("stage", ["start", "load", "compile"])
def test_before_any_column_was_at_work_nothing_is_left_out(stage: str) -> None:
    assert make_run(Path("log"), stage).find_columns_to_leave_out(JOB, "died") is None


def test_without_a_reason_nothing_is_left_out() -> None:
    assert make_run(Path("log"), "tune").find_columns_to_leave_out(JOB, "") is None


def test_the_column_at_work_is_left_out_else_all_contenders() -> None:
    at_work = make_run(Path("log"), "tune", "only kernels")
    assert at_work.find_columns_to_leave_out(JOB, "died") == {"only kernels": "died"}
    any_column = make_run(Path("log"), "measure")
    assert any_column.find_columns_to_leave_out(JOB, "died") == {
        "cudal1": "died",
        "only kernels": "died",
    }


def test_a_process_that_dies_without_contenders_too_is_tried_without_cuda_graphs() -> None:
    reason = "process ended with code 9 in 'measure': x"
    run = make_run(Path("log"), "measure", cudal1=reason, only_kernels="time limit")
    assert run.find_columns_to_leave_out(JOB, reason) == {
        "only kernels": "time limit",
        "reduce-overhead": reason,
    }
    on_cpu = replace(JOB, device="cpu")
    assert run.find_columns_to_leave_out(on_cpu, reason) is None
