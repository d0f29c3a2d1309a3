"""A release file yields a task a line, and a reason for a line that is none."""

from __future__ import annotations

import json
from pathlib import Path

from torch_cudal1.ingest.formats.cuda_l1 import ReleaseLine, UnreadableLine, read_lines
from torch_cudal1.ingest.formats.registry import read_tasks
from torch_cudal1.ingest.formats.task import PublishedTask, UnreadableTask

REFERENCE = "class Model: pass\ndef get_inputs(): return []\ndef get_init_inputs(): return []\n"
CANDIDATE = "class ModelNew: pass\n"


def release(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def line(task: int, code: str | None = CANDIDATE, level: object = 1) -> str:
    return json.dumps(
        {
            "level_id": level,
            "task_id": task,
            "ref_code": REFERENCE,
            "custom_code": code,
            "score_default": 2.5,
            "x": 1,
        }
    )


def test_a_release_file_yields_a_task_a_line_and_a_reason_for_a_damaged_one(tmp_path: Path) -> None:
    path = release(
        tmp_path / "r.json",
        line(1),
        "",
        "{cut",
        line(2, None),
        line(3, "None"),
        '{"task_id": 4}',
        line(5, level="II"),
    )
    tasks = list(read_tasks(path))
    assert [type(task) for task in tasks] == [
        PublishedTask,
        UnreadableTask,
        PublishedTask,
        PublishedTask,
        UnreadableTask,
        PublishedTask,
    ]
    assert [task.where.rpartition(":")[2] for task in tasks] == ["1", "3", "4", "5", "6", "7"]
    first, _, withdrawn, spoken, _, last = tasks
    assert isinstance(first, PublishedTask)
    assert (first.name, first.reference, first.candidate) == (
        "level 1 task 1",
        REFERENCE,
        CANDIDATE,
    )
    assert first.claims == {"score_default": 2.5}
    assert first.labels == {"level_id": 1, "task_id": "1"}
    assert [task.candidate for task in (withdrawn, spoken) if isinstance(task, PublishedTask)] == [
        None,
        None,
    ]
    assert isinstance(last, PublishedTask)
    assert last.labels["level_id"] is None


def test_lines_know_their_numbers(tmp_path: Path) -> None:
    first, second = read_lines(release(tmp_path / "r.json", line(1), "[" * 100_000))
    assert isinstance(first, ReleaseLine)
    assert isinstance(second, UnreadableLine)
    assert (first.number, second.number) == (1, 2)
