"""Runs the tasks: many processes prepare and compile at once, memory of the GPU is rationed
(`memory_shares`), and one of them at a time measures.

Every task has a process of its own (`task_starter`), so a crash, a hang or a lack of memory costs
that task only. While one measures, the others are stopped (SIGSTOP) with all their children, so
that they load neither the machine nor the GPU; their clocks stand still with them. A task that ran
out of memory is tried once more with the GPU to itself. A task whose process died, or had to be
ended, while a column was at work is measured again without that column, whose failure stays; one
that dies without any contender too is measured without torch.compile's CUDA graphs. A task that did
not end within the budget of the run has no result: the next run does it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from benchmarks.kernelbench.job import Job
from benchmarks.kernelbench.memory_shares import (
    has_enough_large_waiting,
    is_small,
    limit_request,
    size_grant,
)
from benchmarks.kernelbench.processes import continue_tree, kill_tree, locate_process, stop_tree
from benchmarks.kernelbench.task_channel import receive, send
from benchmarks.kernelbench.task_runs import PendingTask, PoolPlan, Result, TaskRun
from benchmarks.kernelbench.task_starter import TaskStarter
from benchmarks.kernelbench.tasks import Task

__all__ = ["NothingRunsError", "TaskPool"]

_TICK_S = 0.1
_STATUS_INTERVAL_S = 30.0
_MAX_OVERTAKEN_S = 40.0  # a large task that waited longer is overtaken by small ones only
_MAX_FAILED_FIRST_TASKS = 6  # so many first tasks without a single answer are no accident
_MAX_PROCESSES_PER_SLOT = 2  # processes for each worker, those that wait for memory included
_OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "STATUS_ALLOC_FAILED",
)
_TAIL_BYTES = 4_096


class NothingRunsError(RuntimeError):
    """Nothing at all runs here: the machine or the checkout is at fault, and no row was kept."""


@dataclass
class TaskPool:
    """One call of the benchmark. Each result is handed to `deliver` as soon as it is known."""

    job: Job
    plan: PoolPlan
    candidates: Mapping[str, str | None]
    deliver: Callable[[Result], None]
    pending: list[PendingTask] = field(default_factory=list)
    running: list[TaskRun] = field(default_factory=list)
    measuring: TaskRun | None = None
    quiet_since: float = 0.0
    early_results: list[Result] | None = field(default_factory=list)
    status_printed_at: float = 0.0

    def run(self, tasks: Sequence[Task]) -> int:
        """Run as many tasks as the budget allows; returns how many are left for another call.
        Raises NothingRunsError when the first ones fail in every column.
        """
        self.pending = [PendingTask(task) for task in tasks]
        deadline = time.monotonic() + self.plan.budget_s
        starter = TaskStarter(self.job, self.plan, self.candidates)
        try:
            while self.running or self.pending:
                if time.monotonic() > deadline or (
                    not self.running and not self._may_start(deadline)
                ):
                    break
                self._start_tasks(starter, deadline)
                self._listen()
                self._serve()
                self._reap()
                self._print_status()
        finally:
            remaining = len(self.pending) + len(self.running)
            for task_run in list(self.running):
                if self.plan.claims is not None:
                    self.plan.claims.release(task_run.task)
                self._end(task_run)
            starter.close()
        for result in self.early_results or ():
            self.deliver(result)
        return remaining

    def _print_status(self) -> None:
        """Twice a minute what every task does, for a terminal."""
        now = time.monotonic()
        if now - self.status_printed_at < _STATUS_INTERVAL_S or not self.running:
            return
        self.status_printed_at = now
        states = [
            f"{run.task.key} {f'waits for {run.waits}' if run.waits else run.stage} {now - run.begun_at:.0f} s"
            for run in self.running
        ]
        granted_bytes = sum(run.granted_bytes for run in self.running)
        memory = f"{granted_bytes >> 30} of {self.plan.memory_bytes >> 30} GiB"
        load = f"load {os.getloadavg()[0]:.0f}"
        print(
            f"         {len(self.pending)} to come; {memory}; {load}; {', '.join(states)}",
            flush=True,
        )

    # --- starting ---------------------------------------------------------------------------------

    def _may_start(self, deadline: float) -> bool:
        return deadline - time.monotonic() > self.plan.reserve_s

    def _start_tasks(self, starter: TaskStarter, deadline: float) -> None:
        while (
            self.pending
            and self._count_free_slots() > 0
            and self._may_start(deadline)
            and self.measuring is None
        ):
            crowded = has_enough_large_waiting(self.running, self.plan.memory_bytes)
            ordinary = next(
                (
                    index
                    for index, pending in enumerate(self.pending)
                    if not (pending.alone or (pending.large and crowded))
                ),
                None,
            )
            if ordinary is None and self.running:
                return  # a task that needs the GPU to itself waits until all others have ended
            if any(run.alone for run in self.running):
                return
            chosen = self.pending.pop(ordinary or 0)
            if self.plan.claims is None or self.plan.claims.take(chosen.task):
                self.running.append(starter.start(chosen))

    def _postpone(self, task_run: TaskRun) -> None:
        """End a large task that has only been loaded; it comes again after the others."""
        self._end(task_run)
        if self.plan.claims is not None:
            self.plan.claims.release(task_run.task)
        self.pending.append(PendingTask(task_run.task, lost=task_run.lost, large=True))

    def _count_free_slots(self) -> int:
        """How many more may start: tasks that wait for memory do no work, but must not pile up
        without end.
        """
        working = sum(run.waits != "memory" for run in self.running)
        workers = self.plan.workers
        return min(workers - working, _MAX_PROCESSES_PER_SLOT * workers - len(self.running))

    # --- listening --------------------------------------------------------------------------------

    def _listen(self) -> None:
        by_connection = {run.connection: run for run in self.running}
        for ready in wait(list(by_connection), timeout=_TICK_S):
            task_run = by_connection[ready]  # type: ignore[index]
            try:
                self._handle_message(task_run, receive(task_run.connection))
            except (EOFError, OSError):
                task_run.process.poll()
                # it has closed its end, and is about to end or hangs without it
                time.sleep(_TICK_S / 10)

    def _handle_message(self, task_run: TaskRun, message: Mapping[str, Any]) -> None:
        kind = message.get("ask") or message.get("tell")
        if kind == "memory":
            self._queue_for_memory(task_run, message["bytes"], int(message["kept"]))
        elif kind == "quiet":
            task_run.waits, task_run.waiting_since = "quiet", time.monotonic()
        elif kind == "stage":
            task_run.stage, task_run.column = str(message["name"]), str(message.get("column", ""))
        elif kind == "row":
            task_run.row = message["row"]
        elif kind == "loud":
            self._end_quiet()

    def _queue_for_memory(self, task_run: TaskRun, size: int | None, held_bytes: int) -> None:
        memory_bytes = self.plan.memory_bytes
        crowded = has_enough_large_waiting(self.running, memory_bytes)
        task_run.granted_bytes, task_run.waits = held_bytes, "memory"
        task_run.waiting_since = time.monotonic()
        requested = limit_request(size, memory_bytes, alone=task_run.alone)
        task_run.requested_bytes = requested
        ordinary = task_run.alone or is_small(requested, memory_bytes)
        if crowded and task_run.stage == "load" and not ordinary:
            self._postpone(task_run)

    def _serve(self) -> None:
        """Grant what can be granted, in the order of starts; once a large task has waited long,
        only small ones overtake it.
        """
        large_blocked = False
        for task_run in self.running:
            if task_run.waits == "quiet" and self.measuring is None:
                self._start_quiet(task_run)
            elif task_run.waits == "memory" and self.measuring is None:
                self._give_memory(task_run, large_blocked=large_blocked)
                waited_s = time.monotonic() - task_run.waiting_since
                large_blocked |= bool(task_run.waits) and waited_s > _MAX_OVERTAKEN_S

    def _give_memory(self, task_run: TaskRun, *, large_blocked: bool) -> None:
        assert task_run.requested_bytes is not None
        memory_bytes = self.plan.memory_bytes
        if large_blocked and not is_small(task_run.requested_bytes, memory_bytes):
            return
        size = size_grant(task_run, self.running, memory_bytes)
        if size is not None:
            task_run.granted_bytes = size
            self._grant(task_run)

    def _start_quiet(self, task_run: TaskRun) -> None:
        self.measuring, self.quiet_since = task_run, time.monotonic()
        if self.plan.freeze:
            for other in self.running:
                if other is not task_run:
                    stop_tree(other.process.pid)
        self._grant(task_run)

    def _end_quiet(self) -> None:
        if self.measuring is None:
            return
        quiet_s = time.monotonic() - self.quiet_since
        for other in self.running:
            if other is not self.measuring and self.plan.freeze:
                continue_tree(other.process.pid)
                other.idle_s += quiet_s
        self.measuring = None

    def _grant(self, task_run: TaskRun) -> None:
        task_run.idle_s += time.monotonic() - task_run.waiting_since
        task_run.waits = ""
        try:
            send(task_run.connection, {"granted": True})
        except OSError:
            return  # it has died meanwhile, which `_reap` sees

    # --- ending -----------------------------------------------------------------------------------

    def _reap(self) -> None:
        for task_run in list(self.running):
            code = task_run.process.poll()
            spent_s = time.monotonic() - task_run.begun_at - task_run.idle_s
            if code is not None:
                while task_run.connection.poll():
                    try:
                        self._handle_message(task_run, receive(task_run.connection))
                    except (EOFError, OSError):
                        break
                reason = task_run.describe_exit(code)
                self._finish(task_run, "" if task_run.row is not None else reason)
            elif (
                spent_s > self.job.limit_s
                and not task_run.waits
                and self.measuring in (None, task_run)
            ):
                place = locate_process(task_run.process, task_run.log)
                stage = f"{task_run.stage!r}{place and f', at {place}'}"
                self._finish(task_run, f"time limit of {self.job.limit_s:g} s in {stage}")

    def _finish(self, task_run: TaskRun, reason: str) -> None:
        self._end(task_run)
        row = dict(
            task_run.row
            or {"columns": {}, "best": None, "against": {}, "ours": {}, "arms": {}, "stages_s": {}}
        )
        log_tail = reason and task_run.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        out_of_memory = any(word in log_tail + json.dumps(row) for word in _OUT_OF_MEMORY)
        if out_of_memory and not task_run.alone:
            self.pending.append(PendingTask(task_run.task, alone=True, lost=task_run.lost))
            return
        lost = task_run.find_columns_to_leave_out(self.job, reason)
        if lost is not None:
            self.pending.append(PendingTask(task_run.task, alone=task_run.alone, lost=lost))
            return
        for name in (*self.job.baselines, *self.job.contenders):
            if why := task_run.lost.get(name, reason):
                row["columns"].setdefault(name, {"status": "failed", "reason": why})
        row["wall_s"] = round(time.monotonic() - task_run.begun_at - task_run.idle_s, 3)
        row["alone"] = task_run.alone
        self._deliver(Result(task_run.task, row))

    def _deliver(self, result: Result) -> None:
        """Hand a row over; the first rows are held back until a column of some task has run."""
        if self.early_results is None:
            self.deliver(result)
            return
        self.early_results.append(result)
        if any(column["status"] == "ok" for column in result.row["columns"].values()):
            early_results, self.early_results = self.early_results, None
            for early_result in early_results:
                self.deliver(early_result)
        elif len(self.early_results) >= _MAX_FAILED_FIRST_TASKS:
            reasons = {str(column["reason"]) for column in result.row["columns"].values()}
            raise NothingRunsError(
                f"the first {_MAX_FAILED_FIRST_TASKS} tasks failed whole, nothing was kept; "
                f"the last one: {'; '.join(sorted(reasons))[:600]}"
            )

    def _end(self, task_run: TaskRun) -> None:
        kill_tree(task_run.process)
        task_run.connection.close()
        if self.measuring is task_run:
            self._end_quiet()
        self.running.remove(task_run)
