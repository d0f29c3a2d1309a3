"""What a trusting evaluator would believe of a program, in few runs of one warm process: a column of every landscape.

The rule is that of `training.naive`, which measures for a live red-team run; a landscape asks it of thousands of programs. Programs
are kept in a sandbox all the same, and nothing but experiments may reward by it.
"""

from __future__ import annotations

from types import TracebackType

import torch

from torch_cudal1.judge.limits import limits_for
from torch_cudal1.judge.sandbox import CandidateFailure, Child
from torch_cudal1.records import Contract
from torch_cudal1.settings import Settings
from torch_cudal1.training.records import Decoded, TrainingTask

__all__ = ["Trusting"]

_WORKER = "torch_cudal1.training.landscape.worker"
_LOANS = 32  # programs that one process runs before it is replaced


class Trusting:
    """Use it as a context manager."""

    def __init__(self, device: torch.device, settings: Settings | None = None) -> None:
        self._limits = limits_for(settings or Settings(), device)
        self._child: Child | None = None
        self._loans = 0

    def __enter__(self) -> Trusting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End its process. Safe to call twice."""
        if self._child is not None:
            self._child.close()
        self._child, self._loans = None, 0

    def speedup(self, task: TrainingTask, program: Decoded) -> float | None:
        """The speed-up that it sees, None for a program that fails or is not close. Raises SandboxError without a process."""
        if self._child is None or not self._child.usable or self._loans >= _LOANS:
            self.close()
            self._child = Child(self._limits, Contract(), worker=_WORKER)
        self._loans += 1
        try:
            answer = self._child.call("naive", reference=task.reference, candidate=program.source)
        except CandidateFailure:
            if self._limits.gpu:  # a kernel that went wrong may have taken the context with it
                self.close()
            return None
        return round(float(answer["speedup"]), 3) if answer["close"] else None
