"""The speed-ups that a naive evaluator would report, in few runs of a pool of processes: a column
of every landscape.

The rule is that of `training.naive`, which measures for a live red-team run; a landscape needs it
for thousands of programs. Programs run in a sandbox all the same, and only experiments may take
such a speed-up as a reward.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType

import torch

from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.pool.gpu_rw_lock import GpuReadWriteLock
from torch_cudal1.judge.pool.measured import Decoded, TrainingTask
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.sandbox.fork_server import ForkServer
from torch_cudal1.judge.sandbox.limits import make_limits

__all__ = ["NaivePool"]

_WORKER = "torch_cudal1.training.landscape.landscape_worker"
# Modules that are imported stay in a process, and with them what their candidates keep in memory.
_MAX_PROGRAMS_PER_PROCESS = 128


class _WorkerState(threading.local):
    """The process of one thread, and its lock of the GPU."""

    def __init__(self) -> None:
        self.child: Child | None = None
        self.programs_run = 0
        self.gate: GpuReadWriteLock | None = None


class NaivePool:
    """Measures by the naive rule in several processes. Use it as a context manager. `folder`: of
    the locks of the judge's slots, if they measure on the same device at the same time.
    """

    def __init__(
        self,
        device: torch.device,
        settings: Settings | None = None,
        *,
        workers: int = 1,
        folder: Path | None = None,
    ) -> None:
        self._device, self._folder = device, folder
        self._limits = make_limits(settings or Settings(), device)
        # Linux kills a child with the thread that started it: these threads live as long as this
        # object
        self._threads = ThreadPoolExecutor(workers, "cudal1-naive")
        self._state = _WorkerState()
        # Started with the first program, since a landscape without refused programs needs none.
        self._fork_server: ForkServer | None = None
        self._starting = threading.Lock()
        self._children: set[Child] = set()
        self._gates: list[GpuReadWriteLock] = []

    def __enter__(self) -> NaivePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End its processes, also in the middle of a program. Safe to call twice."""
        # Threads first: one that is still measuring would start a new child after the others were
        # closed.
        self._threads.shutdown(cancel_futures=True)
        while self._children:
            self._children.pop().close()
        if self._fork_server is not None:
            self._fork_server.close()
        self._fork_server = None
        while self._gates:
            self._gates.pop().close()

    def submit(self, task: TrainingTask, program: Decoded) -> Future[float | None]:
        """`speedup`, as soon as a worker is free."""
        return self._threads.submit(self.speedup, task, program)

    def speedup(self, task: TrainingTask, program: Decoded) -> float | None:
        """The speed-up as the naive evaluator measures it, None for a program that fails or is not
        close. Raises SandboxError where no process can be started.
        """
        child = self._get_child()
        try:
            # Outside the gate: drawing inputs and compiling took 0.6 s, in which benchmarks of the
            # judge had to wait when this was one request.
            child.call("ready", reference=task.reference, candidate=program.source)
            # For the measurement only: benchmarks of the judge wait until it is over.
            with self._hold_gpu():
                answer = child.call("naive")
        except CandidateFailure:
            # a kernel that went wrong may have corrupted the CUDA context
            if self._limits.gpu or not child.usable:
                self._close_child()
            return None
        return round(float(answer["speedup"]), 3) if answer["close"] else None

    def _get_child(self) -> Child:
        state = self._state
        if (
            # A process that is used again has its imports and its CUDA context, which cost seconds.
            state.child is None
            or not state.child.usable
            or state.programs_run >= _MAX_PROGRAMS_PER_PROCESS
        ):
            self._close_child()
            state.child = Child(
                self._limits, Contract(), worker=_WORKER, fork_server=self._get_fork_server()
            )
            self._children.add(state.child)
        state.programs_run += 1
        return state.child

    def _get_fork_server(self) -> ForkServer:
        """Return the server that forks the processes. A program that fails on a GPU costs a
        process, and starting another one from scratch would spend seconds on imports.
        """
        # Several threads come here at once, and a second server would be forgotten and never
        # closed.
        with self._starting:
            if self._fork_server is None:
                self._fork_server = ForkServer(("triton",) if self._limits.gpu else ())
            return self._fork_server

    def _close_child(self) -> None:
        state = self._state
        if state.child is not None:
            self._children.discard(state.child)
            state.child.close()
        state.child, state.programs_run = None, 0

    def _hold_gpu(self) -> AbstractContextManager[None]:
        if self._folder is None:
            return nullcontext()
        # A lock for each thread: threads of one file descriptor would share what one of them holds.
        if self._state.gate is None:
            self._state.gate = GpuReadWriteLock(self._folder, self._device)
            self._gates.append(self._state.gate)
        # Shared with the judge's slots that validate; a slot that times waits until all of them
        # have left.
        return self._state.gate.hold_shared()
