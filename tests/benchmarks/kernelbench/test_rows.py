"""The file of results: what is there is not done again, and what does not belong together is told
apart.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.kernelbench import rows
from benchmarks.kernelbench.job import PROFILES, Job
from benchmarks.kernelbench.tasks import Task

JOB = Job("cpu", PROFILES["quick"])
TASK = Task(1, 1, "T", "source", "today")
ROW: dict[str, Any] = {"columns": {}, "against": {}}


def put(out: Path, task: Task = TASK, job: Job = JOB, **row: Any) -> None:
    rows.append_row(out, task, {**ROW, **row}, job, {"gpu": ""}, of=250)


def test_a_row_says_its_precision_its_sizes_and_how_many_tasks_there_are(tmp_path: Path) -> None:
    out = tmp_path / "new" / "rows.jsonl"
    put(out)
    (row,) = rows.read_rows(out)
    assert (
        row["precision"] == "float32; TF32 in convolutions only (PyTorch's default), for everyone"
    )
    assert (row["of"], row["task"]["scale"], row["task"]["sizes"], row["task"]["key"]) == (
        250,
        1,
        "today",
        "1/1",
    )
    assert Job.from_json(row["job"]) == JOB


def test_a_task_is_done_only_for_this_source_and_this_job(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    put(out)
    assert rows.list_finished([out], JOB, [TASK]) == {("1/1", TASK.digest)}
    assert rows.list_finished([out], JOB, [replace(TASK, source="other")]) == set()
    for other in (
        replace(JOB, rights="tf32"),
        replace(JOB, scale=2),
        replace(JOB, arms=("only kernels",)),
        replace(JOB, device="cuda:0"),
    ):
        assert rows.list_finished([out], other, [TASK]) == set()


def test_a_line_cut_off_by_a_kill_is_no_result_and_the_next_row_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    put(out)
    out.write_bytes(out.read_bytes()[:-20])
    assert rows.read_rows(out) == []
    put(out, replace(TASK, number=2))
    assert [row["task"]["key"] for row in rows.read_rows(out)] == ["1/2"]


def test_the_newest_row_of_a_task_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    put(first, best="eager")
    put(second, best="torch.compile")
    assert [row["best"] for row in rows.read_rows(first, second)] == ["torch.compile"]


def test_failed_rows_can_be_asked_for_again(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    put(out, columns={"cudal1": {"status": "failed", "reason": "time limit"}})
    assert rows.list_finished([out], JOB, [TASK]) == {("1/1", TASK.digest)}
    assert rows.list_finished([out], JOB, [TASK], without_failed=True) == set()
