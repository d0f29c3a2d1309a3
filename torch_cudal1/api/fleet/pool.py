"""Gives the tasks of a warm-up to a crew of workers and collects the answers, whoever the workers
are.

A crew is anything that can be given a task and answers it, or says that its worker died. A dead
worker's task is given out once more and then reported. Answers come back in the order of the tasks,
so what is reported does not depend on how many workers there are. No process is started here, and
nothing is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch_cudal1.api.fleet.task import Answer, Task
from torch_cudal1.api.fleet.warmup_journal import Journal
from torch_cudal1.core.errors import Cudal1Error

__all__ = ["Crew", "Progress", "Report", "WorkerDiedError", "carry_out"]

Progress: TypeAlias = Callable[
    [str, float | None], None
]  # what is being done, and the fraction done if known
_ATTEMPTS = 2
_LOOK_S = 0.5  # how long an interrupt may go unnoticed


class WorkerDiedError(Cudal1Error, RuntimeError):
    """A worker ended without an answer; `worker` names it and `found` says how it ended."""

    def __init__(self, worker: str, found: str) -> None:
        self.worker, self.found = worker, found
        super().__init__(worker, found)

    def __str__(self) -> str:
        return f"{self.worker} died: {self.found}"


class Crew(Protocol):
    """Workers behind one call."""

    @property
    def size(self) -> int:
        """How many tasks it works on at once."""

    def submit(self, task: Task, say: Progress) -> Answer:
        """The answer, when a worker has it. Called from `size` threads at once. Raises
        WorkerDiedError.
        """

    def close(self) -> None:
        """End every worker now, with what it is doing; a `submit` under way then raises. May be
        called twice.
        """


@dataclass
class _Board:
    """How far all tasks are. The fraction of one never falls, and only its answer makes it whole."""

    tasks: int
    tell: Progress
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: dict[Task, float] = field(default_factory=dict)
    done: int = 0

    def say(self, task: Task, what: str, fraction: float | None) -> None:
        with self.lock:
            known = max(self.running.get(task, 0.0), 0.9 * min(fraction or 0.0, 1.0))
            self.running[task] = known
            self._show(f"{task.label}: {what}")

    def finish(self, task: Task) -> None:
        with self.lock:
            self.running.pop(task, None)
            self.done += 1
            self._show(f"{task.label}: done")

    def _show(self, what: str) -> None:
        fraction = (self.done + sum(self.running.values())) / self.tasks
        self.tell(
            f"{self.done} of {self.tasks} tasks done, {len(self.running)} running; {what}", fraction
        )


@dataclass(frozen=True)
class Report:
    """The answers in the order of the tasks, and what else a person should know."""

    answers: tuple[Answer, ...]
    problems: tuple[str, ...]


def carry_out(tasks: Sequence[Task], crew: Crew, journal: Journal, progress: Progress) -> Report:
    """Every task's answer. Tasks that an interrupted run had finished are not given out; equal ones
    are given out once.

    Interrupted, the crew is closed and the interrupt goes on; what is finished stays in the cache
    and in the journal.
    """
    unique = tuple(dict.fromkeys(tasks))
    answers = journal.finished(unique)
    left = [task for task in unique if task not in answers]
    problems: list[str] = []
    board = _Board(len(left), progress)

    def keep(task: Task, answer: Answer) -> None:
        answers[task] = answer
        board.finish(task)
        problem = journal.add(answer) if answer.finished and not problems else ""
        problems.extend([problem] if problem else [])

    try:
        if left:
            _give_out(left, crew, board, keep)
    finally:
        crew.close()
    if all(answer.finished for answer in answers.values()):
        journal.close()
    return Report(tuple(answers[task] for task in unique), tuple(problems))


def _give_out(
    tasks: Sequence[Task], crew: Crew, board: _Board, keep: Callable[[Task, Answer], None]
) -> None:
    pool = ThreadPoolExecutor(crew.size, "cudal1-crew")
    futures: dict[Future[Answer], Task] = {
        pool.submit(_attempted, crew, task, board): task for task in tasks
    }
    waiting = set(futures)
    try:
        while waiting:
            done, waiting = wait(waiting, _LOOK_S, FIRST_COMPLETED)
            for future in done:
                keep(futures[future], future.result())
    finally:
        for future in waiting:
            future.cancel()
        if waiting:
            crew.close()  # so that no thread waits for an answer
        pool.shutdown(cancel_futures=True)


def _attempted(crew: Crew, task: Task, board: _Board) -> Answer:
    deaths: list[str] = []
    for _ in range(_ATTEMPTS):
        try:
            return crew.submit(task, lambda what, fraction: board.say(task, what, fraction))
        except WorkerDiedError as death:
            deaths.append(str(death))
            board.say(task, "its worker died", None)
    return Answer(task, died=f"given out {_ATTEMPTS} times: " + "; ".join(dict.fromkeys(deaths)))
