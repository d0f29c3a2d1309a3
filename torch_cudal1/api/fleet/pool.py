"""Gives the tasks of a warm-up to a pool of workers and collects the answers.

A pool takes a task and answers it, or raises that its worker died. The task of a dead worker is
submitted once more and then reported. Answers come back in the order of the tasks,
so what is reported does not depend on how many workers there are. No process is started here, and
nothing is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch_cudal1.api.fleet.warmup_journal import WarmupJournal
from torch_cudal1.api.fleet.warmup_task import WarmupAnswer, WarmupTask
from torch_cudal1.core.errors import Cudal1Error

__all__ = ["PoolReport", "Progress", "WorkerDiedError", "WorkerPool", "run_tasks"]

# Called with the activity, and the fraction done if it is known.
Progress: TypeAlias = Callable[[str, float | None], None]
# The task of a dead worker is submitted once more; a second death is reported.
MAX_ATTEMPTS = 2
# How long an interrupt may go unnoticed.
POLL_INTERVAL_S = 0.5


class WorkerDiedError(Cudal1Error, RuntimeError):
    """A worker ended without an answer; `worker` names it and `found` says how it ended."""

    def __init__(self, worker: str, found: str) -> None:
        self.worker, self.found = worker, found
        super().__init__(worker, found)

    def __str__(self) -> str:
        return f"{self.worker} died: {self.found}"


class WorkerPool(Protocol):
    """Workers behind one call."""

    @property
    def size(self) -> int:
        """How many tasks it works on at once."""

    def submit(self, task: WarmupTask, say: Progress) -> WarmupAnswer:
        """Wait for a worker's answer to `task`. Called from up to `size` threads at once. Raises
        WorkerDiedError.
        """

    def close(self) -> None:
        """End every worker now, with what it is doing; a `submit` under way then raises. May be
        called twice.
        """


@dataclass
class _ProgressBoard:
    """Progress of all tasks. A task's fraction never falls, and is 1 only when its answer is there."""

    tasks: int
    tell: Progress
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: dict[WarmupTask, float] = field(default_factory=dict)
    finished: int = 0

    def say(self, task: WarmupTask, activity: str, fraction: float | None) -> None:
        with self.lock:
            # Reports of a second attempt start at 0 again; 0.9, because only the answer makes a
            # task whole.
            shown_fraction = max(self.running.get(task, 0.0), 0.9 * min(fraction or 0.0, 1.0))
            self.running[task] = shown_fraction
            self._show(f"{task.label}: {activity}")

    def finish(self, task: WarmupTask) -> None:
        with self.lock:
            self.running.pop(task, None)
            self.finished += 1
            self._show(f"{task.label}: done")

    def _show(self, activity: str) -> None:
        fraction = (self.finished + sum(self.running.values())) / self.tasks
        self.tell(
            f"{self.finished} of {self.tasks} tasks done, {len(self.running)} running; {activity}",
            fraction,
        )


@dataclass(frozen=True)
class PoolReport:
    """The answers in the order of the tasks, and what else a person should know."""

    answers: tuple[WarmupAnswer, ...]
    problems: tuple[str, ...]


def run_tasks(
    tasks: Sequence[WarmupTask], pool: WorkerPool, journal: WarmupJournal, progress: Progress
) -> PoolReport:
    """Every task's answer. Tasks that an interrupted run had finished are not submitted; equal tasks
    are submitted once.

    Interrupted, the pool is closed and the interrupt goes on; what is finished stays in the cache
    and in the journal.
    """
    unique = tuple(dict.fromkeys(tasks))
    answers = journal.find_finished(unique)
    open_tasks = [task for task in unique if task not in answers]
    problems: list[str] = []
    board = _ProgressBoard(len(open_tasks), progress)

    def store_answer(task: WarmupTask, answer: WarmupAnswer) -> None:
        answers[task] = answer
        board.finish(task)
        # A journal that cannot be written is reported once, not for each task.
        if answer.is_finished and not problems and (refusal := journal.add(answer)):
            problems.append(refusal.reason)

    try:
        if open_tasks:
            _submit_tasks(open_tasks, pool, board, store_answer)
    finally:
        # Also after an interrupt: workers hold GPUs.
        pool.close()
    # A journal that stays makes the next run try only what failed.
    if all(answer.is_finished for answer in answers.values()):
        journal.close()
    return PoolReport(tuple(answers[task] for task in unique), tuple(problems))


def _submit_tasks(
    tasks: Sequence[WarmupTask],
    pool: WorkerPool,
    board: _ProgressBoard,
    store_answer: Callable[[WarmupTask, WarmupAnswer], None],
) -> None:

    threads = ThreadPoolExecutor(pool.size, "cudal1-pool")
    futures: dict[Future[WarmupAnswer], WarmupTask] = {
        threads.submit(_run_with_retry, pool, task, board): task for task in tasks
    }
    waiting = set(futures)
    try:
        while waiting:
            finished, waiting = wait(waiting, POLL_INTERVAL_S, FIRST_COMPLETED)
            for future in finished:
                store_answer(futures[future], future.result())
    finally:
        for future in waiting:
            future.cancel()
        if waiting:
            # Interrupted: with the workers ended, no thread waits for an answer any more.
            pool.close()
        threads.shutdown(cancel_futures=True)


def _run_with_retry(pool: WorkerPool, task: WarmupTask, board: _ProgressBoard) -> WarmupAnswer:
    deaths: list[str] = []
    for _ in range(MAX_ATTEMPTS):
        try:
            return pool.submit(task, lambda activity, fraction: board.say(task, activity, fraction))
        except WorkerDiedError as death:
            deaths.append(str(death))
            board.say(task, "its worker died", None)
    return WarmupAnswer(
        task, died=f"given out {MAX_ATTEMPTS} times: " + "; ".join(dict.fromkeys(deaths))
    )
