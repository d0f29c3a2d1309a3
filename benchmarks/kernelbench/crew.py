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
from benchmarks.kernelbench.processes import end, freeze, thaw, where
from benchmarks.kernelbench.tasks import Task
from benchmarks.kernelbench.template import ForkedProcess, NoTemplate, Template

__all__ = ["CACHE", "Broken", "Crew", "Plan", "Result"]

_ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = "cudal1"  # the package's own, in the folder of work
_TICK_S = 0.1
_TELL_S = 30.0
_OVERTAKEN_S = 40.0
# large tasks that wait for memory at once; more of them would keep every seat from small ones
_LARGE_WAITING = 2
_SMALL_SHARE, _FOR_SMALL = (
    0.05,
    0.35,
)  # of the memory: what a small task takes at most, and what is kept free for all of them
_GUESS = 4  # a task of unknown size gets this part of the memory; too little of it is found out
_BROKEN = 6  # so many first tasks without a single answer are no accident
_MOST_WAITING = 2  # processes for each worker, those that wait for memory included
_OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "STATUS_ALLOC_FAILED",
)
_TAIL_BYTES = 4_096
_DIED = "process ended with code"


class Broken(RuntimeError):
    """Nothing at all runs here: the machine or the checkout is at fault, and no row was kept."""


@dataclass(frozen=True)
class Plan:
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
class _Running:
    """A task's process. `alone`: it has the GPU to itself. `lost`: columns that it runs without,
    and why. `column`: at work alone.

    `idle_s`: how long it was stopped or waited for a grant, which no limit counts. `waits`: for
    what it waits since `asked`.
    """

    task: Task
    process: subprocess.Popen[bytes] | ForkedProcess
    connection: Connection
    log: Path
    alone: bool
    lost: Mapping[str, str]
    began: float
    stage: str = "start"
    column: str = ""
    idle_s: float = 0.0
    granted: int = 0
    wanted: int | None = None
    waits: Literal["", "memory", "quiet"] = ""
    asked: float = 0.0
    row: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Pending:
    """`large`: known to be, since it was set aside for others."""

    task: Task
    alone: bool = False
    lost: Mapping[str, str] = field(default_factory=dict)
    large: bool = False


@dataclass
class Crew:
    """One call of the benchmark. `results` are handed over as they come."""

    job: Job
    plan: Plan
    candidates: Mapping[str, str | None]
    deliver: Callable[[Result], None]
    pending: list[_Pending] = field(default_factory=list)
    running: list[_Running] = field(default_factory=list)
    holder: _Running | None = None
    since: float = 0.0
    unproven: list[Result] | None = field(default_factory=list)
    template: Template | None = None
    told: float = 0.0

    def run(self, tasks: Sequence[Task]) -> int:
        """Do as many as the budget allows; how many are left for another call. Raises Broken when
        the first ones all fail whole.
        """
        self.pending = [_Pending(task) for task in tasks]
        deadline = time.monotonic() + self.plan.budget_s
        self._make_template()
        try:
            while self.running or self.pending:
                if time.monotonic() > deadline or (
                    not self.running and not self._may_start(deadline)
                ):
                    break
                self._start_some(deadline)
                self._listen()
                self._serve()
                self._reap()
                self._tell()
        finally:
            left = len(self.pending) + len(self.running)
            for one in list(self.running):
                if self.plan.claims is not None:
                    self.plan.claims.release(one.task)
                self._end(one)
            if self.template is not None:
                self.template.close()
        for result in self.unproven or ():
            self.deliver(result)
        return left

    def _tell(self) -> None:
        """Twice a minute what everybody is at, for a terminal."""
        now = time.monotonic()
        if now - self.told < _TELL_S or not self.running:
            return
        self.told = now
        at = [
            f"{one.task.key} {f'waits for {one.waits}' if one.waits else one.stage} {now - one.began:.0f} s"
            for one in self.running
        ]
        memory = f"{sum(one.granted for one in self.running) >> 30} of {self.plan.memory_bytes >> 30} GiB"
        load = f"load {os.getloadavg()[0]:.0f}"
        print(
            f"         {len(self.pending)} to come; {memory}; {load}; {', '.join(at)}", flush=True
        )

    # --- starting ---------------------------------------------------------------------------------------------------------------

    def _may_start(self, deadline: float) -> bool:
        return deadline - time.monotonic() > self.plan.reserve_s

    def _start_some(self, deadline: float) -> None:
        while (
            self.pending and self._seats() > 0 and self._may_start(deadline) and self.holder is None
        ):
            crowded = self._crowded()
            ordinary = next(
                (
                    i
                    for i, one in enumerate(self.pending)
                    if not (one.alone or (one.large and crowded))
                ),
                None,
            )
            if ordinary is None and self.running:
                return  # what needs the GPU to itself waits until everybody else has ended
            if any(one.alone for one in self.running):
                return
            upcoming = self.pending.pop(ordinary or 0)
            if self.plan.claims is None or self.plan.claims.take(upcoming.task):
                self.running.append(self._start(upcoming))

    def _crowded(self) -> bool:
        """Whether as many large tasks wait for memory as should."""
        waiting = (one.wanted for one in self.running if one.waits == "memory" and not one.alone)
        return (
            sum(wanted is not None and not self._is_small(wanted) for wanted in waiting)
            >= _LARGE_WAITING
        )

    def _is_small(self, wanted: int) -> bool:
        return wanted <= _SMALL_SHARE * self.plan.memory_bytes

    def _set_aside(self, one: _Running) -> None:
        """End a large task that has only been loaded; it comes again after the others."""
        self._end(one)
        if self.plan.claims is not None:
            self.plan.claims.release(one.task)
        self.pending.append(_Pending(one.task, lost=one.lost, large=True))

    def _seats(self) -> int:
        """How many more may start: tasks that wait for memory do no work, but must not pile up
        without end.
        """
        working = sum(one.waits != "memory" for one in self.running)
        return min(
            self.plan.workers - working, _MOST_WAITING * self.plan.workers - len(self.running)
        )

    def _start(self, one: _Pending) -> _Running:
        task, folder = one.task, self.plan.work / "tasks"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"level{task.level}_{task.number}"
        spec, log = folder / f"{name}.json", folder / f"{name}.log"
        spec.with_suffix(".py").write_text(task.source, encoding="utf-8")
        job = self.job.withdraw(one.lost)
        told: dict[str, Any] = {
            "job": job.to_json(),
            "source": task.source,
            "candidate": self.candidates.get(task.key),
        }
        told |= {"cache": str(self.plan.work / CACHE), "threads": self.plan.threads}
        spec.write_text(json.dumps(told), encoding="utf-8")
        mine, theirs = Pipe()
        with log.open("wb") as output:
            process = self._process(spec, theirs.fileno(), output)
        theirs.close()
        return _Running(task, process, mine, log, one.alone, one.lost, time.monotonic())

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
        found = dict(os.environ)
        found["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(_ROOT), found.get("PYTHONPATH", "")])
        )
        found["TORCHINDUCTOR_CACHE_DIR"] = str(self.plan.work / "inductor")
        found["TRITON_CACHE_DIR"] = str(self.plan.work / "triton")
        # Whole tasks run side by side: a pool of compilers in each of them would only start more
        # processes.
        found["TORCHINDUCTOR_COMPILE_THREADS"] = str(self.plan.threads)
        found["OMP_NUM_THREADS"] = str(self.plan.threads)
        found["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
            "1"  # a question about GPUs must not start the driver in the template
        )
        return found

    # --- listening --------------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        by_connection = {one.connection: one for one in self.running}
        for ready in wait(list(by_connection), timeout=_TICK_S):
            one = by_connection[ready]  # type: ignore[index]
            try:
                self._heard(one, receive(one.connection))
            except (EOFError, OSError):
                one.process.poll()
                time.sleep(
                    _TICK_S / 10
                )  # it has closed its end, and is about to end or hangs without it

    def _heard(self, one: _Running, message: Mapping[str, Any]) -> None:
        kind = message.get("ask") or message.get("tell")
        if kind == "memory":
            size = message["bytes"]
            crowded = self._crowded()
            one.granted, one.waits, one.asked = int(message["kept"]), "memory", time.monotonic()
            guess = self.plan.memory_bytes // _GUESS if size is None else int(size)
            one.wanted = self.plan.memory_bytes if one.alone else min(guess, self.plan.memory_bytes)
            if crowded and one.stage == "load" and not (one.alone or self._is_small(one.wanted)):
                self._set_aside(one)
        elif kind == "quiet":
            one.waits, one.asked = "quiet", time.monotonic()
        elif kind == "stage":
            one.stage, one.column = str(message["name"]), str(message.get("column", ""))
        elif kind == "row":
            one.row = message["row"]
        elif kind == "loud":
            self._loud()

    def _serve(self) -> None:
        """Grant what can be granted, in the order of starts; who has waited long is overtaken only
        by small ones.
        """
        kept_free = False
        for one in self.running:
            if one.waits == "quiet" and self.holder is None:
                self._hold(one)
            elif one.waits == "memory" and self.holder is None:
                self._give_memory(one, kept_free=kept_free)
                kept_free = kept_free or (
                    bool(one.waits) and time.monotonic() - one.asked > _OVERTAKEN_S
                )

    def _give_memory(self, one: _Running, *, kept_free: bool) -> None:
        """Grant what it wants, if that is left beside what others have, those that wait included."""
        assert one.wanted is not None
        small = self._is_small(one.wanted)
        if kept_free and not small:
            return
        others = [other for other in self.running if other is not one]
        kept = sum(other.granted for other in others if other.waits == "memory")
        free = max(
            0, self.plan.memory_bytes - kept - (0 if one.alone or small else self._for_small())
        )
        wanted = min(one.wanted, free)  # however large it is, it runs with what there can be
        working = [other.granted for other in others if other.waits != "memory"]
        beside = sum(size for size in working if small or one.alone or not self._is_small(size))
        if wanted <= free - beside:
            one.granted = wanted
            self._grant(one)

    def _for_small(self) -> int:
        """What large tasks leave to small ones: as much as those have and want, so that however
        large a task is, it waits for other large ones and hardly ever for the many small ones; and
        one's worth for the next that comes.
        """
        most = self.plan.memory_bytes
        sizes = (one.wanted if one.waits == "memory" else one.granted for one in self.running)
        small = sum(size for size in sizes if size is not None and self._is_small(size))
        return int(min(max(small, _SMALL_SHARE * most), _FOR_SMALL * most))

    def _hold(self, one: _Running) -> None:
        self.holder, self.since = one, time.monotonic()
        if self.plan.freeze:
            for other in self.running:
                if other is not one:
                    freeze(other.process.pid)
        self._grant(one)

    def _loud(self) -> None:
        if self.holder is None:
            return
        held_s = time.monotonic() - self.since
        for other in self.running:
            if other is not self.holder and self.plan.freeze:
                thaw(other.process.pid)
                other.idle_s += held_s
        self.holder = None

    def _grant(self, one: _Running) -> None:
        one.idle_s += time.monotonic() - one.asked
        one.waits = ""
        try:
            send(one.connection, {"granted": True})
        except OSError:
            return  # it has died meanwhile, which `_reap` sees

    # --- ending -----------------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        for one in list(self.running):
            code = one.process.poll()
            spent_s = time.monotonic() - one.began - one.idle_s
            if code is not None:
                while one.connection.poll():
                    try:
                        self._heard(one, receive(one.connection))
                    except (EOFError, OSError):
                        break
                died = f"{_DIED} {code} in {one.stage!r}: {_last(one.log)}"
                self._finish(one, "" if one.row is not None else died)
            elif spent_s > self.job.limit_s and not one.waits and self.holder in (None, one):
                place = where(one.process, one.log)
                self._finish(
                    one,
                    f"time limit of {self.job.limit_s:g} s in {one.stage!r}{place and f', at {place}'}",
                )

    def _finish(self, one: _Running, reason: str) -> None:
        self._end(one)
        row = dict(
            one.row
            or {"columns": {}, "best": None, "against": {}, "ours": {}, "arms": {}, "stages_s": {}}
        )
        told = reason and one.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        short = any(word in told + json.dumps(row) for word in _OUT_OF_MEMORY)
        if short and not one.alone:
            self.pending.append(_Pending(one.task, alone=True, lost=one.lost))
            return
        lost = self._blamed(one, reason)
        if lost is not None:
            self.pending.append(_Pending(one.task, alone=one.alone, lost=lost))
            return
        for name in (*self.job.baselines, *self.job.contenders):
            if why := one.lost.get(name, reason):
                row["columns"].setdefault(name, {"status": "failed", "reason": why})
        row["wall_s"] = round(time.monotonic() - one.began - one.idle_s, 3)
        row["alone"] = one.alone
        self._deliver(Result(one.task, row))

    def _blamed(self, one: _Running, reason: str) -> Mapping[str, str] | None:
        """The columns to try without, and why: a contender whose own work it was, else all of them.
        None: nothing more to try.

        What dies again without any contender, dies of a baseline: of the one that runs most of
        other people's code. Contenders that were only suspected come back.
        """
        if not reason or one.stage.startswith(("start", "load", "compile")):
            return None
        job = self.job.withdraw(one.lost)
        if job.contenders:
            at_fault = [one.column] if one.column in job.contenders else job.contenders
            return {**one.lost, **dict.fromkeys(at_fault, reason)}
        if REDUCE in job.baselines and reason.startswith(_DIED):
            return {name: why for name, why in one.lost.items() if not why.startswith(_DIED)} | {
                REDUCE: reason
            }
        return None

    def _deliver(self, result: Result) -> None:
        """Hand a row over; the first ones are kept back until any column of any task has run."""
        if self.unproven is None:
            self.deliver(result)
            return
        self.unproven.append(result)
        if any(column["status"] == "ok" for column in result.row["columns"].values()):
            proven, self.unproven = self.unproven, None
            for one in proven:
                self.deliver(one)
        elif len(self.unproven) >= _BROKEN:
            reasons = {str(column["reason"]) for column in result.row["columns"].values()}
            raise Broken(
                f"the first {_BROKEN} tasks failed whole, nothing was kept; the last one: {'; '.join(sorted(reasons))[:600]}"
            )

    def _end(self, one: _Running) -> None:
        end(one.process)
        one.connection.close()
        if self.holder is one:
            self._loud()
        self.running.remove(one)


def _last(log: Path) -> str:
    """The last line a process wrote, for its failure's reason; of a crash, which it was and where."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    for at, line in enumerate(lines):
        if line.startswith("Fatal Python error"):
            frames = [each.strip() for each in lines[at:] if each.startswith("  File ")]
            return ", ".join((line, *frames[:1]))[:300]
    return lines[-1][:300] if lines else "it wrote nothing"
