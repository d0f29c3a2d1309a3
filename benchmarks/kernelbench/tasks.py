"""Which tasks there are: the files of a KernelBench checkout, the references of a CUDA-L1 release
file, or a data set of the Hub.

A task is text until its own process runs it. Levels 1 to 3 are the benchmark; a line that is no
task, or a task that occurs twice, is an error and not skipped. `shrink_task` makes small tasks out
of large ones, for trying the benchmark out and for nothing else: a task that was cut down keeps its
`scale` in every row.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch_cudal1.ingest.formats.cuda_l1 import UnreadableLine, read_lines

__all__ = [
    "LEVELS",
    "Choice",
    "Task",
    "TaskError",
    "read_release_candidates",
    "read_tasks",
    "select_tasks",
    "shrink_task",
]

LEVELS = (1, 2, 3)
_FILE = re.compile(r"(\d+)_(.+)\.py")
_MIN_DIVIDED, _SIZE_MULTIPLE, _MIN_BATCH = 128, 64, 2
_BATCH_LIKE_NAME = re.compile(r"batch|num_classes|num_boxes|expansion|growth", re.IGNORECASE)


class TaskError(ValueError):
    """Tasks that cannot be read: what was expected, what came, what to do."""


@dataclass(frozen=True)
class Task:
    """A KernelBench-style source. `sizes`: whose ("today": a checkout's, "release": a CUDA-L1
    file's); `scale` 1: as published.
    """

    level: int
    number: int
    name: str
    source: str
    sizes: str
    scale: int = 1

    @property
    def key(self) -> str:
        """For messages and file names: "1/23"."""
        return f"{self.level}/{self.number}"

    @property
    def digest(self) -> str:
        """SHA-256 of the source as it runs."""
        return hashlib.sha256(self.source.encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Choice:
    """Which of the tasks to run. `shard` (i, n): every n-th, beginning with the i-th, from 0.
    `only`: keys such as "1/23".
    """

    levels: tuple[int, ...] = LEVELS
    only: tuple[str, ...] = ()
    shard: tuple[int, int] = (0, 1)


def read_tasks(location: str) -> list[Task]:
    """All tasks of a folder, a .json release file, or hf:OWNER/NAME, by level and number. Raises
    TaskError, OSError.
    """
    if location.startswith("hf:"):
        tasks = _read_hub(location.removeprefix("hf:"))
    elif location.endswith(".json"):
        tasks = _read_release(Path(location))
    else:
        tasks = _read_checkout(Path(location))
    duplicates = [key for key, count in Counter(task.key for task in tasks).items() if count > 1]
    if duplicates:
        raise TaskError(
            f"{location} holds tasks {', '.join(duplicates[:5])} more than once; expected each level and number once"
        )
    return sorted(tasks, key=lambda task: (task.level, task.number))


def select_tasks(tasks: Sequence[Task], choice: Choice) -> list[Task]:
    """The chosen tasks in order. Raises TaskError for an unknown key, and when no task is left."""
    keys = {task.key for task in tasks}
    if absent := [key for key in choice.only if key not in keys]:
        raise TaskError(
            f"no task {', '.join(absent)}; expected keys such as {', '.join(sorted(keys)[:3])}"
        )
    at, of = choice.shard
    if not 0 <= at < of:
        raise TaskError(f"shard {at}/{of}; expected I/N with 0 <= I < N")
    chosen = [
        task
        for task in tasks
        if (task.key in choice.only if choice.only else task.level in choice.levels)
    ]
    if not chosen[at::of]:
        raise TaskError(f"no task is left of {len(tasks)} after --level, --only and --shard")
    return chosen[at::of]


def read_release_candidates(path: Path) -> dict[str, str | None]:
    """The candidates of a CUDA-L1 release file by key; None where its authors withdrew the code.
    Raises TaskError, OSError.
    """
    candidates: dict[str, str | None] = {}
    for line in read_lines(path):
        if isinstance(line, UnreadableLine):
            raise TaskError(f"{path} line {line.number}: {line.reason}")
        candidates[f"{line.level}/{line.task}"] = line.candidate
    return candidates


def shrink_task(task: Task, scale: int) -> Task:
    """The task with the large whole numbers at the top of its source divided by `scale`: to try the
    benchmark out, not to quote.

    Numbers of 128 and more become multiples of 64 (so that groups and heads still divide them),
    batches at least 2. Shapes that no longer fit together make the task fail, which is said of it
    then.
    """
    if scale <= 1:
        return task
    tree = ast.parse(task.source)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            batch = bool(_BATCH_LIKE_NAME.match(node.targets[0].id))
            node.value = _DivideSizes(scale, batch).visit(node.value)
    return replace(task, source=ast.unparse(ast.fix_missing_locations(tree)) + "\n", scale=scale)


class _DivideSizes(ast.NodeTransformer):
    """Divides the whole numbers of an expression."""

    def __init__(self, scale: int, batch: bool) -> None:
        self._scale, self._batch = scale, batch

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        value = node.value
        if type(value) is not int:
            return node
        if self._batch:
            return ast.Constant(max(min(value, _MIN_BATCH), value // self._scale))
        return (
            ast.Constant(
                max(_SIZE_MULTIPLE, value // self._scale // _SIZE_MULTIPLE * _SIZE_MULTIPLE)
            )
            if value >= _MIN_DIVIDED
            else node
        )


def _read_checkout(folder: Path) -> list[Task]:
    base = folder / "KernelBench" if (folder / "KernelBench").is_dir() else folder
    tasks = []
    for level in LEVELS:
        for path in sorted((base / f"level{level}").glob("*.py")):
            if match := _FILE.fullmatch(path.name):
                tasks.append(
                    Task(
                        level,
                        int(match[1]),
                        match[2].strip("_"),
                        path.read_text(encoding="utf-8"),
                        "today",
                    )
                )
    if not tasks:
        raise TaskError(
            f"{folder} holds no level1/NUMBER_NAME.py to level3/...; expected a checkout of KernelBench"
        )
    return tasks


def _read_release(path: Path) -> list[Task]:
    tasks = []
    for line in read_lines(path):
        if isinstance(line, UnreadableLine):
            raise TaskError(f"{path} line {line.number}: {line.reason}")
        if line.level not in LEVELS or not line.task.isdigit():
            raise TaskError(
                f"{path} line {line.number}: level {line.level!r}, task {line.task!r}; expected levels 1 to 3, a number"
            )
        tasks.append(
            Task(
                line.level,
                int(line.task),
                f"level {line.level} task {line.task}",
                line.reference,
                "release",
            )
        )
    if not tasks:
        raise TaskError(
            f"{path} holds no task; expected one JSON object a line, the CUDA-L1 release format"
        )
    return tasks


def _read_hub(name: str) -> list[Task]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise TaskError(
            "hf:... needs the package datasets (pip install 'torch-cudal1[train]'); or give a checkout"
        ) from error
    tasks = []
    for level in LEVELS:
        for row in load_dataset(name, split=f"level_{level}"):
            tasks.append(
                Task(level, int(row["problem_id"]), str(row["name"]), str(row["code"]), "today")
            )
    return tasks
