"""What a trusting evaluator would believe of a program, in few runs of warm processes: a column of
every landscape.

The rule is that of `training.naive`, which measures for a live red-team run; a landscape asks it of
thousands of programs. Programs are kept in a sandbox all the same, and nothing but experiments may
reward by it.
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
from torch_cudal1.judge.pool.gpu_rw_lock import Gate
from torch_cudal1.judge.pool.measured import Decoded, TrainingTask
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.sandbox.fork_server import Nursery
from torch_cudal1.judge.sandbox.limits import limits_for

__all__ = ["Trusting"]

_WORKER = "torch_cudal1.training.landscape.landscape_worker"
_LOANS = 128  # programs that one process runs before it is replaced


class _Hand(threading.local):
    """What one thread works with."""

    def __init__(self) -> None:
        self.child: Child | None = None
        self.loans = 0
        self.gate: Gate | None = None


class Trusting:
    """Use it as a context manager. `folder`: of the locks of lanes that measure on the same device
    meanwhile, if there are any.
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
        self._limits = limits_for(settings or Settings(), device)
        # Linux kills a child with the thread that started it: these threads live as long as this
        # object
        self._threads = ThreadPoolExecutor(workers, "cudal1-naive")
        self._hand = _Hand()
        self._nursery: Nursery | None = None
        self._starting = threading.Lock()
        self._children: set[Child] = set()
        self._gates: list[Gate] = []

    def __enter__(self) -> Trusting:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End its processes, whatever they are at. Safe to call twice."""
        self._threads.shutdown(cancel_futures=True)
        while self._children:
            self._children.pop().close()
        if self._nursery is not None:
            self._nursery.close()
        self._nursery = None
        while self._gates:
            self._gates.pop().close()

    def later(self, task: TrainingTask, program: Decoded) -> Future[float | None]:
        """`speedup`, as soon as one of the workers is free."""
        return self._threads.submit(self.speedup, task, program)

    def speedup(self, task: TrainingTask, program: Decoded) -> float | None:
        """The speed-up that it sees, None for a program that fails or is not close. Raises
        SandboxError without a process.
        """
        child = self._child()
        try:
            child.call("ready", reference=task.reference, candidate=program.source)
            with self._shared():  # only for moments: a race waits for whoever is inside
                answer = child.call("naive")
        except CandidateFailure:
            if (
                self._limits.gpu or not child.usable
            ):  # a kernel that went wrong may have taken the context with it
                self._dismiss()
            return None
        return round(float(answer["speedup"]), 3) if answer["close"] else None

    def _child(self) -> Child:
        hand = self._hand
        if hand.child is None or not hand.child.usable or hand.loans >= _LOANS:
            self._dismiss()
            hand.child = Child(self._limits, Contract(), worker=_WORKER, nursery=self._forker())
            self._children.add(hand.child)
        hand.loans += 1
        return hand.child

    def _forker(self) -> Nursery:
        """What forks its processes: a program that fails on a GPU costs one, and a new one would
        import for seconds.
        """
        with self._starting:
            if self._nursery is None:
                self._nursery = Nursery(("triton",) if self._limits.gpu else ())
            return self._nursery

    def _dismiss(self) -> None:
        hand = self._hand
        if hand.child is not None:
            self._children.discard(hand.child)
            hand.child.close()
        hand.child, hand.loans = None, 0

    def _shared(self) -> AbstractContextManager[None]:
        if self._folder is None:
            return nullcontext()
        if self._hand.gate is None:
            self._hand.gate = Gate(self._folder, self._device)
            self._gates.append(self._hand.gate)
        return self._hand.gate.shared()
