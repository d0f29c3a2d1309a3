"""A worker pool on this machine: one process for each GPU, or some for the CPU.

A GPU's worker sees that GPU alone and has its own share of the cores: its judge times on the GPU
while Inductor's compile workers and Triton run on those cores. The judge's lock of a GPU
(`device.gpu_lock.lock_gpu`) keeps two warm-ups of this machine from timing on it at once. Workers
of the CPU share all cores, as the decision must hold for all of them; they disturb each other's
measurements, which costs decisions that were close, never right answers.

A worker is started at its first task and again after a death. It is ended with its judge processes
when the pool is closed, and ends by itself when this process is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torch_cudal1.api.fleet.pool import Progress, WorkerDiedError
from torch_cudal1.api.fleet.warmup_task import WarmupAnswer, WarmupOrder, WarmupTask
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.settings import process_environment, select_environment

__all__ = ["LocalPool", "WorkerSlot", "list_cpu_slots", "list_gpu_slots"]

# Longer than the worker's own 10 s, in which it ends its judge processes.
SHUTDOWN_GRACE_S = 15.0
LOG_TAIL_BYTES = 2000
_PACKAGE = Path(__file__).resolve().parents[3]
_COMMAND = (sys.executable, "-m", "torch_cudal1.api.fleet.fleet_worker")


@dataclass(frozen=True)
class WorkerSlot:
    """Where one worker works: its name for people, variables of its own, and the cores that it may
    use.
    """

    name: str
    variables: Mapping[str, str]
    cores: tuple[int, ...]


def list_gpu_slots(devices: str, count: int, cores: Sequence[int]) -> tuple[WorkerSlot, ...]:
    """A worker slot for each of `devices`.

    `devices` is "all", or torch's numbers such as "0,2"; `count` GPUs exist. Raises SettingError
    for a device that does not exist or is named twice.
    """
    expected = (
        f"'all' or different numbers from 0 to {count - 1}, such as '0' or '0,1'"
        if count
        else "no GPU: torch finds none"
    )
    try:
        chosen = (
            list(range(count)) if devices == "all" else [int(part) for part in devices.split(",")]
        )
    except ValueError:
        raise SettingError("devices", devices, expected) from None
    if (
        not chosen
        or len(set(chosen)) != len(chosen)
        or not all(0 <= number < count for number in chosen)
    ):
        raise SettingError("devices", devices, expected)
    # The user's own CUDA_VISIBLE_DEVICES maps torch's numbers to GPUs, and may hold UUIDs.
    visible = select_environment({"CUDA_VISIBLE_DEVICES"}, ()).get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    shares = _split_cores(cores, len(chosen))
    return tuple(
        WorkerSlot(
            f"the worker of GPU {number}", {"CUDA_VISIBLE_DEVICES": names[number].strip()}, share
        )
        for number, share in zip(chosen, shares, strict=True)
    )


def list_cpu_slots(count: int, cores: Sequence[int]) -> tuple[WorkerSlot, ...]:
    """`count` worker slots that share all cores."""
    return tuple(WorkerSlot(f"worker {number}", {}, tuple(cores)) for number in range(count))


def _split_cores(cores: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Neighbouring cores in equal parts; with fewer cores than parts each worker has all."""
    if len(cores) < parts:
        return [tuple(cores)] * parts
    return [
        tuple(cores[len(cores) * part // parts : len(cores) * (part + 1) // parts])
        for part in range(parts)
    ]


class LocalPool:
    """Worker processes of this machine, one for each slot."""

    def __init__(self, order: WarmupOrder, slots: Sequence[WorkerSlot]) -> None:
        self._workers = [_Worker(order, slot) for slot in slots]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    @property
    def size(self) -> int:
        """How many tasks it works on at once."""
        return len(self._workers)

    def submit(self, task: WarmupTask, progress: Progress) -> WarmupAnswer:
        """The answer of the first worker that is free. Raises WorkerDiedError."""
        worker = self._idle.get()
        try:
            return worker.ask(task, progress)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End every worker, all at once."""
        # First all are asked, then each is waited for: the grace times must not add up.
        for worker in self._workers:
            worker.tell_to_end()
        for worker in self._workers:
            worker.end()


@dataclass
class _Worker:
    """One process, or none yet. `closed`: it was asked to end, and starts no more."""

    order: WarmupOrder
    slot: WorkerSlot
    process: subprocess.Popen[str] | None = None
    answers: IO[str] | None = None
    log: IO[bytes] | None = None
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, task: WarmupTask, progress: Progress) -> WarmupAnswer:
        """Give it a task and wait. Raises WorkerDiedError."""
        self._start()
        self._write({"target": task.target, "signature": task.signature})
        while True:
            message = self._read()
            if "say" in message:
                activity, fraction = message["say"]
                progress(activity, fraction)
            elif "answer" in message:
                return WarmupAnswer.from_json(message["answer"])

    def _start(self) -> None:
        with self.lock:
            # A thread that waited for a free worker must not start one after `close`.
            if self.closed:
                raise WorkerDiedError(self.slot.name, "the warm-up is over")
            if self.process is not None and self.process.poll() is None:
                return
            reading, writing = os.pipe()
            # A file, not a pipe: no thread would empty a pipe, and a full one would block the
            # worker.
            self.log = tempfile.TemporaryFile()  # noqa: SIM115
            # The worker imports this very package, also where it runs from a source tree.
            path = os.pathsep.join(
                [str(_PACKAGE), *filter(None, [process_environment().get("PYTHONPATH")])]
            )
            with contextlib.ExitStack() as stack:
                # Closed here in any case: only then does reading end when the worker dies.
                stack.callback(os.close, writing)
                self.process = subprocess.Popen(
                    [*_COMMAND, str(writing)],
                    stdin=subprocess.PIPE,
                    stdout=self.log,
                    stderr=subprocess.STDOUT,
                    env={**process_environment(), **self.slot.variables, "PYTHONPATH": path},
                    pass_fds=(writing,),
                    # In a session of its own a Ctrl-C does not reach the worker: this process ends
                    # it.
                    start_new_session=True,
                    text=True,
                )
            self.answers = os.fdopen(reading, encoding="utf-8")
        self._write({"order": self.order.to_json(), "cores": list(self.slot.cores)})

    def _write(self, value: Any) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            print(json.dumps(value), file=self.process.stdin, flush=True)
        except (OSError, ValueError) as error:
            # ValueError: `close` has closed the pipe meanwhile.
            raise self._make_death_error() from error

    def _read(self) -> dict[str, Any]:
        assert self.answers is not None
        try:
            line = self.answers.readline()
            # A line without its end was cut off by the death of the worker.
            message = json.loads(line) if line.endswith("\n") else None
        except (OSError, ValueError):
            message = None
        if not isinstance(message, dict):
            raise self._make_death_error()
        return message

    def _make_death_error(self) -> WorkerDiedError:
        """The error for a worker that died, with its exit code and last log lines. Ends the process."""
        process, log = self.process, self.log
        assert process is not None
        assert log is not None
        # The pipe is at its end, so the process is dying: this collects its exit code.
        _end_process(process, 1.0)
        code = process.returncode
        ending = (
            signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        )
        # The last lines say why, such as an out-of-memory error; a log may be large.
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        last_lines = log.read().decode(errors="replace").strip().splitlines()[-3:]
        self._close_files()
        return WorkerDiedError(
            self.slot.name, ": ".join([ending, *([" / ".join(last_lines)] if last_lines else [])])
        )

    def tell_to_end(self) -> None:
        """Ask it to end, without waiting."""
        with self.lock:
            self.closed = True
            if self.process is not None and self.process.poll() is None:
                self.process.terminate()

    def end(self) -> None:
        """Wait for its end, and make it end if that takes long."""
        if self.process is not None:
            _end_process(self.process, SHUTDOWN_GRACE_S)
        self._close_files()

    def _close_files(self) -> None:
        for file in (self.answers, self.log):
            if file is not None:
                file.close()


def _end_process(process: subprocess.Popen[str], grace_s: float) -> None:
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            # The end of stdin asks the worker to end its judge processes; killing it at once would
            # orphan them.
            process.stdin.close()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
