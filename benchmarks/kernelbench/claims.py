"""Which of several runs side by side does a task: the run that creates the task's file first. A
claim ends with the process that made it.

All runs go through all tasks in one order, so that every GPU has work until the last task is taken.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kernelbench.tasks import Task

__all__ = ["Claims", "order_tasks"]

_WHOLE_MODEL_LEVEL = 3


@dataclass(frozen=True)
class Claims:
    """A folder of files, one a task, each with the number of the process that took it."""

    folder: Path

    def take(self, task: Task) -> bool:
        """Whether the task belongs to this process, now or since before. False: another live
        process has it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(task)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(str(os.getpid()))
        try:
            os.link(temporary, path)  # whole at once, or not at all
        except FileExistsError:
            if _is_claimed_by_other(path, own_pid=os.getpid()):
                return False
            # two that do this at once do the task twice, which costs time and nothing else
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def release(self, task: Task) -> None:
        """Another run may have it."""
        self._path(task).unlink(missing_ok=True)

    def _path(self, task: Task) -> Path:
        return self.folder / f"level{task.level}_{task.number}_{task.digest[:8]}.claim"


def order_tasks(tasks: Sequence[Task]) -> list[Task]:
    """The tasks in an order that is the same in every run: levels mixed, so that large and small
    tasks share a GPU, whole models in the first half.
    """
    return sorted(
        tasks,
        key=lambda task: int(task.digest[:8], 16) // (2 if task.level == _WHOLE_MODEL_LEVEL else 1),
    )


def _is_claimed_by_other(path: Path, *, own_pid: int) -> bool:
    """Whether the process that made this claim runs, and is not `own_pid`."""
    try:
        pid = int(path.read_text())
        os.kill(pid, 0)
    except PermissionError:
        return True  # a process of another user
    except (OSError, ValueError):
        return False
    return pid != own_pid
