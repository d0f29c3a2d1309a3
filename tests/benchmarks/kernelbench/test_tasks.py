"""Which tasks there are: read from a checkout or a release file, chosen, cut down."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.kernelbench.tasks import (
    Choice,
    Task,
    TaskError,
    read_release_candidates,
    read_tasks,
    select_tasks,
    shrink_task,
)

SOURCE = """import torch
batch_size = 64
features = 4096 * 2
groups = 8

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 1000

def get_inputs():
    return [torch.rand(batch_size, features)]

def get_init_inputs():
    return []
"""


def write_checkout(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / "KernelBench" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SOURCE)
    return folder


def write_release(path: Path, *lines: tuple[int, str, str | None]) -> Path:
    line_values = [
        {"level_id": level, "task_id": task, "ref_code": SOURCE, "custom_code": code}
        for level, task, code in lines
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in line_values))
    return path


def list_keys(tasks: list[Task]) -> list[str]:
    return [task.key for task in tasks]


def test_a_checkouts_tasks_come_by_level_and_number(tmp_path: Path) -> None:
    names = (
        "level2/10_B.py",
        "level1/2_A_.py",
        "level1/10_C.py",
        "level4/1_X.py",
        "changelog/notes.py",
        "level1/README.py",
    )
    tasks = read_tasks(str(write_checkout(tmp_path, *names)))
    assert list_keys(tasks) == ["1/2", "1/10", "2/10"]  # level 4 is no part of the benchmark
    assert (tasks[0].name, tasks[0].sizes, tasks[0].source) == ("A", "today", SOURCE)
    assert read_tasks(str(tmp_path / "KernelBench")) == tasks


def test_a_release_files_references_are_tasks_of_their_own_sizes(tmp_path: Path) -> None:
    path = write_release(tmp_path / "h100.json", (2, "3", "code"), (1, "7", None), (1, "5", "None"))
    assert [(task.key, task.sizes) for task in read_tasks(str(path))] == [
        ("1/5", "release"),
        ("1/7", "release"),
        ("2/3", "release"),
    ]
    assert read_release_candidates(path) == {"2/3": "code", "1/7": None, "1/5": None}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "holds no task"),
        (((1, "1", "a"), (1, "1", "b")), "1/1 more than once"),
        (((9, "1", "a"),), "line 1: level 9"),
    ],
)
def test_a_release_file_that_is_none_is_an_error(
    tmp_path: Path, lines: tuple[tuple[int, str, str]], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        read_tasks(str(write_release(tmp_path / "r.json", *lines)))


def test_a_damaged_line_is_not_passed_over(tmp_path: Path) -> None:
    path = write_release(tmp_path / "r.json", (1, "1", "a"))
    path.write_text(path.read_text() + "{")
    with pytest.raises(TaskError, match="line 2"):
        read_tasks(str(path))
    with pytest.raises(TaskError, match="line 2"):
        read_release_candidates(path)


def test_a_folder_without_tasks_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="expected a checkout of KernelBench"):
        read_tasks(str(tmp_path))


def test_a_data_set_of_the_hub_has_a_split_for_each_level(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def load_dataset(name: str, split: str) -> list[dict[str, object]]:
        requests.append((name, split))
        return [{"problem_id": 3, "name": "3_Thing", "code": SOURCE}]

    fake = ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert list_keys(read_tasks("hf:somebody/KernelBench")) == ["1/3", "2/3", "3/3"]
    assert requests == [("somebody/KernelBench", f"level_{level}") for level in (1, 2, 3)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match="needs the package datasets"):
        read_tasks("hf:somebody/KernelBench")


def test_shards_are_disjoint_and_together_everything(tmp_path: Path) -> None:
    tasks = read_tasks(
        str(
            write_checkout(
                tmp_path, *(f"level{level}/{n}_T.py" for level in (1, 2) for n in range(1, 6))
            )
        )
    )
    parts = [list_keys(select_tasks(tasks, Choice(shard=(at, 3)))) for at in range(3)]
    assert sorted(key for part in parts for key in part) == sorted(list_keys(tasks))
    assert list_keys(select_tasks(tasks, Choice(levels=(2,)))) == [
        "2/1",
        "2/2",
        "2/3",
        "2/4",
        "2/5",
    ]
    assert list_keys(select_tasks(tasks, Choice(only=("2/4", "1/1")))) == ["1/1", "2/4"]


@pytest.mark.parametrize(
    "choice", [Choice(only=("1/77",)), Choice(levels=(3,)), Choice(shard=(3, 3))]
)
def test_a_choice_that_leaves_nothing_is_an_error(tmp_path: Path, choice: Choice) -> None:
    with pytest.raises(TaskError):
        select_tasks(read_tasks(str(write_checkout(tmp_path, "level1/1_T.py"))), choice)


def test_cutting_down_divides_sizes_and_marks_the_task_for_ever() -> None:
    task = Task(1, 1, "T", SOURCE, "today")
    small = shrink_task(task, 16)
    names: dict[str, object] = {}
    exec(small.source, names)
    assert (names["batch_size"], names["features"], names["groups"]) == (4, 512, 8)
    assert small.scale == 16
    assert "* 1000" in small.source  # what a forward computes is not a size
    assert small.digest != task.digest
    assert shrink_task(task, 1) == task
