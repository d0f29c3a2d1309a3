"""The values of a pool of tasks: how a run is done, a task that waits, a task whose process runs,
and a result.

It starts no process and decides nothing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks.kernelbench.claims import Claims
from benchmarks.kernelbench.job import REDUCE, Job
from benchmarks.kernelbench.tasks import Task
from benchmarks.kernelbench.template import ForkedProcess

__all__ = ["PendingTask", "PoolPlan", "Result", "TaskRun"]

_EXIT_REASON = "process ended with code"


@dataclass(frozen=True)
class PoolPlan:
    """How the run is done, which changes no result's meaning.

    `memory_bytes`: of the GPU (or host), what tasks may take together. `budget_s`: of the whole
    call. `reserve_s`: no task is started with less left. `work`: a folder for caches, kept between
    calls. `freeze`: other tasks are stopped while one measures. `command`: what runs a task that is
    started from nothing. `fork`: tasks are forked where that works. `claims`: files by which runs
    side by side share the tasks.
    """

    work: Path
    workers: int
    threads: int
    memory_bytes: int
    budget_s: float
    reserve_s: float = 40.0
    freeze: bool = True
    command: tuple[str, ...] = (sys.executable, "-m", "benchmarks.kernelbench.child")
    fork: bool = False
    claims: Claims | None = None


@dataclass(frozen=True)
class Result:
    """A task's row: sent by its process, or made here with the reason where that process died or
    was ended.
    """

    task: Task
    row: Mapping[str, Any]


@dataclass(frozen=True)
class PendingTask:
    """A task to start. `alone`: with the GPU to itself. `lost`: columns to leave out, and why.
    `large`: it asked for much memory when it ran before.
    """

    task: Task
    alone: bool = False
    lost: Mapping[str, str] = field(default_factory=dict)
    large: bool = False


@dataclass
class TaskRun:
    """A task whose process runs. `lost`: columns that it runs without, and why. `column`: the one
    that is at work alone.

    `idle_s`: how long it was stopped or waited for a grant, which no limit counts. `waits`: what it
    has waited for since `waiting_since`.
    """

    task: Task
    process: subprocess.Popen[bytes] | ForkedProcess
    connection: Connection
    log: Path
    alone: bool
    lost: Mapping[str, str]
    begun_at: float
    stage: str = "start"
    column: str = ""
    idle_s: float = 0.0
    granted_bytes: int = 0
    requested_bytes: int | None = None
    waits: Literal["", "memory", "quiet"] = ""
    waiting_since: float = 0.0
    row: Mapping[str, Any] | None = None

    def describe_exit(self, code: int) -> str:
        """The reason of a process that ended without a row."""
        return f"{_EXIT_REASON} {code} in {self.stage!r}: {_find_last_line(self.log)}"

    def find_columns_to_leave_out(self, job: Job, reason: str) -> Mapping[str, str] | None:
        """The columns that the next try leaves out, and why: the contender that was at work, else
        all contenders. None: nothing is left to try.

        A process that dies again without any contender died of a baseline, most likely of
        reduce-overhead, which runs most of PyTorch's code. Contenders that were left out on
        suspicion then come back.
        """
        if not reason or self.stage.startswith(("start", "load", "compile")):
            return None
        job = job.withdraw(self.lost)
        if job.contenders:
            at_fault = [self.column] if self.column in job.contenders else job.contenders
            return {**self.lost, **dict.fromkeys(at_fault, reason)}
        if REDUCE in job.baselines and reason.startswith(_EXIT_REASON):
            proven = {n: why for n, why in self.lost.items() if not why.startswith(_EXIT_REASON)}
            return proven | {REDUCE: reason}
        return None


def _find_last_line(log: Path) -> str:
    """The last line that a process wrote; of a crash of the interpreter, which one and where."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    for at, line in enumerate(lines):
        if line.startswith("Fatal Python error"):
            frames = [frame.strip() for frame in lines[at:] if frame.startswith("  File ")]
            return ", ".join((line, *frames[:1]))[:300]
    return lines[-1][:300] if lines else "it wrote nothing"
