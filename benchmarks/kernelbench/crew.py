"""Runs the tasks: many processes prepare and compile at once, memory of the GPU is rationed, and
one of them at a time measures.

Every task has a process of its own, forked from a `template` or started from nothing, so a crash, a
hang or a lack of memory costs that task. While one measures, the others are stopped (SIGSTOP) with
all their children, so they neither load the machine nor the GPU; their clocks stand still with
them. A task that ran out of memory is tried once more with the GPU to itself. A task whose process
had to be ended, or died, while a column was at work is measured again without that column, so that
the others are known, and the failure stays; what dies without any of them too is measured without
torch.compile's CUDA graphs. What did not end within the budget of the run is no result: the next
run does it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, Literal

from benchmarks.kernelbench.claims import Claims
from benchmarks.kernelbench.job import REDUCE, Job
from benchmarks.kernelbench.line import receive, send
from benchmarks.kernelbench.processes import continue_tree, kill_tree, locate_process, stop_tree
from benchmarks.kernelbench.tasks import Task
from benchmarks.kernelbench.template import ForkedProcess, NoTemplate, Template

__all__ = ["CACHE", "NothingRunsError", "PoolPlan", "Result", "TaskPool"]

_ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = "cudal1"  # the package's own, in the folder of work
_TICK_S = 0.1
_STATUS_INTERVAL_S = 30.0
_MAX_OVERTAKEN_S = 40.0
# large tasks that wait for memory at once; more of them would keep every seat from small ones
_MAX_LARGE_WAITING = 2
_MAX_SMALL_SHARE, _MAX_FREE_FOR_SMALL_SHARE = (
    0.05,
    0.35,
)  # of the memory: what a small task takes at most, and what is kept free for all of them
_UNKNOWN_SIZE_DIVISOR = (
    4  # a task of unknown size gets this part of the memory; too little of it is found out
)
_MAX_FAILED_FIRST_TASKS = 6  # so many first tasks without a single answer are no accident
_MAX_PROCESSES_PER_SLOT = 2  # processes for each worker, those that wait for memory included
_OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "STATUS_ALLOC_FAILED",
)
_TAIL_BYTES = 4_096
_EXIT_REASON = "process ended with code"


class NothingRunsError(RuntimeError):
    """Nothing at all runs here: the machine or the checkout is at fault, and no row was kept."""


@dataclass(frozen=True)
class PoolPlan:
    """How the run is done, which changes no result's meaning. `memory_bytes`: of the GPU (or host),
    what tasks may take together.

    `budget_s`: of the whole call. `reserve_s`: no task is started with less left. `work`: a folder
    for caches, kept between calls. `command`: what runs a task that is started from nothing.
    `fork`: tasks are forked where that works. `claims`: by which runs side by side share the tasks.
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
    """A task's row, as its process told it or, where that had to be ended or died, made here with
    the reason.
    """

    task: Task
    row: Mapping[str, Any]


@dataclass
class _TaskRun:
    """A task's process. `alone`: it has the GPU to itself. `lost`: columns that it runs without,
    and why. `column`: at work alone.

    `idle_s`: how long it was stopped or waited for a grant, which no limit counts. `waits`: for
    what it waits since `waiting_since`.
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


@dataclass(frozen=True)
class _PendingTask:
    """`large`: known to be, since it was set aside for others."""

    task: Task
    alone: bool = False
    lost: Mapping[str, str] = field(default_factory=dict)
    large: bool = False


@dataclass
class TaskPool:
    """One call of the benchmark. `results` are handed over as they come."""

    job: Job
    plan: PoolPlan
    candidates: Mapping[str, str | None]
    deliver: Callable[[Result], None]
    pending: list[_PendingTask] = field(default_factory=list)
    running: list[_TaskRun] = field(default_factory=list)
    measuring: _TaskRun | None = None
    quiet_since: float = 0.0
    early_results: list[Result] | None = field(default_factory=list)
    template: Template | None = None
    status_printed_at: float = 0.0

    def run(self, tasks: Sequence[Task]) -> int:
        """Do as many as the budget allows; how many are left for another call. Raises Broken when
        the first ones all fail whole.
        """
        self.pending = [_PendingTask(task) for task in tasks]
        deadline = time.monotonic() + self.plan.budget_s
        self._make_template()
        try:
            while self.running or self.pending:
                if time.monotonic() > deadline or (
                    not self.running and not self._may_start(deadline)
                ):
                    break
                self._start_tasks(deadline)
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
            if self.template is not None:
                self.template.close()
        for result in self.early_results or ():
            self.deliver(result)
        return remaining

    def _print_status(self) -> None:
        """Twice a minute what everybody is at, for a terminal."""
        now = time.monotonic()
        if now - self.status_printed_at < _STATUS_INTERVAL_S or not self.running:
            return
        self.status_printed_at = now
        states = [
            f"{task_run.task.key} {f'waits for {task_run.waits}' if task_run.waits else task_run.stage} {now - task_run.begun_at:.0f} s"
            for task_run in self.running
        ]
        memory = f"{sum(task_run.granted_bytes for task_run in self.running) >> 30} of {self.plan.memory_bytes >> 30} GiB"
        load = f"load {os.getloadavg()[0]:.0f}"
        print(
            f"         {len(self.pending)} to come; {memory}; {load}; {', '.join(states)}",
            flush=True,
        )

    # --- starting ---------------------------------------------------------------------------------------------------------------

    def _may_start(self, deadline: float) -> bool:
        return deadline - time.monotonic() > self.plan.reserve_s

    def _start_tasks(self, deadline: float) -> None:
        while (
            self.pending
            and self._count_free_slots() > 0
            and self._may_start(deadline)
            and self.measuring is None
        ):
            crowded = self._has_enough_large_waiting()
            ordinary = next(
                (
                    i
                    for i, pending in enumerate(self.pending)
                    if not (pending.alone or (pending.large and crowded))
                ),
                None,
            )
            if ordinary is None and self.running:
                return  # what needs the GPU to itself waits until everybody else has ended
            if any(pending.alone for pending in self.running):
                return
            chosen = self.pending.pop(ordinary or 0)
            if self.plan.claims is None or self.plan.claims.take(chosen.task):
                self.running.append(self._start(chosen))

    def _has_enough_large_waiting(self) -> bool:
        """Whether as many large tasks wait for memory as should."""
        waiting = (
            task_run.requested_bytes
            for task_run in self.running
            if task_run.waits == "memory" and not task_run.alone
        )
        return (
            sum(
                requested_bytes is not None and not self._is_small(requested_bytes)
                for requested_bytes in waiting
            )
            >= _MAX_LARGE_WAITING
        )

    def _is_small(self, requested_bytes: int) -> bool:
        return requested_bytes <= _MAX_SMALL_SHARE * self.plan.memory_bytes

    def _postpone(self, task_run: _TaskRun) -> None:
        """End a large task that has only been loaded; it comes again after the others."""
        self._end(task_run)
        if self.plan.claims is not None:
            self.plan.claims.release(task_run.task)
        self.pending.append(_PendingTask(task_run.task, lost=task_run.lost, large=True))

    def _count_free_slots(self) -> int:
        """How many more may start: tasks that wait for memory do no work, but must not pile up
        without end.
        """
        working = sum(task_run.waits != "memory" for task_run in self.running)
        return min(
            self.plan.workers - working,
            _MAX_PROCESSES_PER_SLOT * self.plan.workers - len(self.running),
        )

    def _start(self, pending: _PendingTask) -> _TaskRun:
        task, folder = pending.task, self.plan.work / "tasks"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"level{task.level}_{task.number}"
        spec, log = folder / f"{name}.json", folder / f"{name}.log"
        spec.with_suffix(".py").write_text(task.source, encoding="utf-8")
        job = self.job.withdraw(pending.lost)
        spec_values: dict[str, Any] = {
            "job": job.to_json(),
            "source": task.source,
            "candidate": self.candidates.get(task.key),
        }
        spec_values |= {"cache": str(self.plan.work / CACHE), "threads": self.plan.threads}
        spec.write_text(json.dumps(spec_values), encoding="utf-8")
        connection, child_end = Pipe()
        with log.open("wb") as output:
            process = self._process(spec, child_end.fileno(), output)
        child_end.close()
        return _TaskRun(
            task, process, connection, log, pending.alone, pending.lost, time.monotonic()
        )

    def _process(
        self, spec: Path, line: int, output: IO[bytes]
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        """A task's process: forked, or started from nothing where there is no template, or none any
        more.
        """
        if self.template is not None:
            try:
                return self.template.start(spec, line, output)
            except NoTemplate as error:
                print(f"no more forks: {error}", flush=True)
                self.template.close()
                self.template = None
        return subprocess.Popen(
            [*self.plan.command, "--line", str(line), "--spec", str(spec)],
            cwd=_ROOT,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(line,),
            start_new_session=True,
        )

    def _make_template(self) -> None:
        if not self.plan.fork:
            return
        self.plan.work.mkdir(parents=True, exist_ok=True)
        try:
            self.template = Template(
                self.job.device, self._environment(), _ROOT, self.plan.work / "template.log"
            )
        except NoTemplate as error:
            print(f"every task's process is started from nothing: {error}", flush=True)

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(_ROOT), environment.get("PYTHONPATH", "")])
        )
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self.plan.work / "inductor")
        environment["TRITON_CACHE_DIR"] = str(self.plan.work / "triton")
        # Whole tasks run side by side: a pool of compilers in each of them would only start more
        # processes.
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(self.plan.threads)
        environment["OMP_NUM_THREADS"] = str(self.plan.threads)
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
            "1"  # a question about GPUs must not start the driver in the template
        )
        return environment

    # --- listening --------------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        by_connection = {task_run.connection: task_run for task_run in self.running}
        for ready in wait(list(by_connection), timeout=_TICK_S):
            task_run = by_connection[ready]  # type: ignore[index]
            try:
                self._handle_message(task_run, receive(task_run.connection))
            except (EOFError, OSError):
                task_run.process.poll()
                time.sleep(
                    _TICK_S / 10
                )  # it has closed its end, and is about to end or hangs without it

    def _handle_message(self, task_run: _TaskRun, message: Mapping[str, Any]) -> None:
        kind = message.get("ask") or message.get("tell")
        if kind == "memory":
            size = message["bytes"]
            crowded = self._has_enough_large_waiting()
            task_run.granted_bytes, task_run.waits, task_run.waiting_since = (
                int(message["kept"]),
                "memory",
                time.monotonic(),
            )
            guess = self.plan.memory_bytes // _UNKNOWN_SIZE_DIVISOR if size is None else int(size)
            task_run.requested_bytes = (
                self.plan.memory_bytes if task_run.alone else min(guess, self.plan.memory_bytes)
            )
            if (
                crowded
                and task_run.stage == "load"
                and not (task_run.alone or self._is_small(task_run.requested_bytes))
            ):
                self._postpone(task_run)
        elif kind == "quiet":
            task_run.waits, task_run.waiting_since = "quiet", time.monotonic()
        elif kind == "stage":
            task_run.stage, task_run.column = str(message["name"]), str(message.get("column", ""))
        elif kind == "row":
            task_run.row = message["row"]
        elif kind == "loud":
            self._end_quiet()

    def _serve(self) -> None:
        """Grant what can be granted, in the order of starts; who has waited long is overtaken only
        by small ones.
        """
        large_blocked = False
        for task_run in self.running:
            if task_run.waits == "quiet" and self.measuring is None:
                self._start_quiet(task_run)
            elif task_run.waits == "memory" and self.measuring is None:
                self._give_memory(task_run, large_blocked=large_blocked)
                large_blocked = large_blocked or (
                    bool(task_run.waits)
                    and time.monotonic() - task_run.waiting_since > _MAX_OVERTAKEN_S
                )

    def _give_memory(self, task_run: _TaskRun, *, large_blocked: bool) -> None:
        """Grant what it wants, if that is left beside what others have, those that wait included."""
        assert task_run.requested_bytes is not None
        small = self._is_small(task_run.requested_bytes)
        if large_blocked and not small:
            return
        other_runs = [other for other in self.running if other is not task_run]
        waiting_bytes = sum(other.granted_bytes for other in other_runs if other.waits == "memory")
        free = max(
            0,
            self.plan.memory_bytes
            - waiting_bytes
            - (0 if task_run.alone or small else self._count_bytes_for_small()),
        )
        requested_bytes = min(
            task_run.requested_bytes, free
        )  # however large it is, it runs with what there can be
        working = [other.granted_bytes for other in other_runs if other.waits != "memory"]
        working_bytes = sum(
            size for size in working if small or task_run.alone or not self._is_small(size)
        )
        if requested_bytes <= free - working_bytes:
            task_run.granted_bytes = requested_bytes
            self._grant(task_run)

    def _count_bytes_for_small(self) -> int:
        """What large tasks leave to small ones: as much as those have and want, so that however
        large a task is, it waits for other large ones and hardly ever for the many small ones; and
        one's worth for the next that comes.
        """
        memory_bytes = self.plan.memory_bytes
        sizes = (
            task_run.requested_bytes if task_run.waits == "memory" else task_run.granted_bytes
            for task_run in self.running
        )
        small = sum(size for size in sizes if size is not None and self._is_small(size))
        return int(
            min(
                max(small, _MAX_SMALL_SHARE * memory_bytes),
                _MAX_FREE_FOR_SMALL_SHARE * memory_bytes,
            )
        )

    def _start_quiet(self, task_run: _TaskRun) -> None:
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

    def _grant(self, task_run: _TaskRun) -> None:
        task_run.idle_s += time.monotonic() - task_run.waiting_since
        task_run.waits = ""
        try:
            send(task_run.connection, {"granted": True})
        except OSError:
            return  # it has died meanwhile, which `_reap` sees

    # --- ending -----------------------------------------------------------------------------------------------------------------

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
                died = (
                    f"{_EXIT_REASON} {code} in {task_run.stage!r}: {_last_log_line(task_run.log)}"
                )
                self._finish(task_run, "" if task_run.row is not None else died)
            elif (
                spent_s > self.job.limit_s
                and not task_run.waits
                and self.measuring in (None, task_run)
            ):
                place = locate_process(task_run.process, task_run.log)
                self._finish(
                    task_run,
                    f"time limit of {self.job.limit_s:g} s in {task_run.stage!r}{place and f', at {place}'}",
                )

    def _finish(self, task_run: _TaskRun, reason: str) -> None:
        self._end(task_run)
        row = dict(
            task_run.row
            or {"columns": {}, "best": None, "against": {}, "ours": {}, "arms": {}, "stages_s": {}}
        )
        log_tail = reason and task_run.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        out_of_memory = any(word in log_tail + json.dumps(row) for word in _OUT_OF_MEMORY)
        if out_of_memory and not task_run.alone:
            self.pending.append(_PendingTask(task_run.task, alone=True, lost=task_run.lost))
            return
        lost = self._columns_to_leave_out(task_run, reason)
        if lost is not None:
            self.pending.append(_PendingTask(task_run.task, alone=task_run.alone, lost=lost))
            return
        for name in (*self.job.baselines, *self.job.contenders):
            if why := task_run.lost.get(name, reason):
                row["columns"].setdefault(name, {"status": "failed", "reason": why})
        row["wall_s"] = round(time.monotonic() - task_run.begun_at - task_run.idle_s, 3)
        row["alone"] = task_run.alone
        self._deliver(Result(task_run.task, row))

    def _columns_to_leave_out(self, task_run: _TaskRun, reason: str) -> Mapping[str, str] | None:
        """The columns to try without, and why: a contender whose own work it was, else all of them.
        None: nothing more to try.

        What dies again without any contender, dies of a baseline: of the one that runs most of
        other people's code. Contenders that were only suspected come back.
        """
        if not reason or task_run.stage.startswith(("start", "load", "compile")):
            return None
        job = self.job.withdraw(task_run.lost)
        if job.contenders:
            at_fault = [task_run.column] if task_run.column in job.contenders else job.contenders
            return {**task_run.lost, **dict.fromkeys(at_fault, reason)}
        if REDUCE in job.baselines and reason.startswith(_EXIT_REASON):
            return {
                name: why for name, why in task_run.lost.items() if not why.startswith(_EXIT_REASON)
            } | {REDUCE: reason}
        return None

    def _deliver(self, result: Result) -> None:
        """Hand a row over; the first ones are kept back until any column of any task has run."""
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
                f"the first {_MAX_FAILED_FIRST_TASKS} tasks failed whole, nothing was kept; the last one: {'; '.join(sorted(reasons))[:600]}"
            )

    def _end(self, task_run: _TaskRun) -> None:
        kill_tree(task_run.process)
        task_run.connection.close()
        if self.measuring is task_run:
            self._end_quiet()
        self.running.remove(task_run)


def _last_log_line(log: Path) -> str:
    """The last line a process wrote, for its failure's reason; of a crash, which it was and where."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    for at, line in enumerate(lines):
        if line.startswith("Fatal Python error"):
            frames = [each.strip() for each in lines[at:] if each.startswith("  File ")]
            return ", ".join((line, *frames[:1]))[:300]
    return lines[-1][:300] if lines else "it wrote nothing"
