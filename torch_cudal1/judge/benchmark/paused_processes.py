"""Stops the other side's processes while one side of a cross-process benchmark is timed.

A candidate's threads could load the cores, or work ahead, while the reference is timed; and threads
of an honest one spin for some milliseconds after each call, in wait for the next.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from torch_cudal1.judge.benchmark.cross_process import BatchTimer, TimedBatch
from torch_cudal1.judge.benchmark.same_core import find_descendants

__all__ = ["PausableProcesses", "UndisturbedTimer"]


@dataclass
class PausableProcesses:
    """The descendants of the process `leader`, which itself goes on: it supervises them."""

    leader: int
    processes: list[int] = field(default_factory=list)

    def list_again(self) -> None:
        """Read which processes there are now, which takes milliseconds."""
        self.processes = find_descendants(self.leader)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop them for the body. Those of another user go on."""
        self._send(signal.SIGSTOP)
        try:
            yield
        finally:
            self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for pid in self.processes:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


@dataclass
class UndisturbedTimer:
    """A `BatchTimer` for whose batches other processes stop."""

    timer: BatchTimer
    other_side: PausableProcesses

    @property
    def max_calls(self) -> int:
        """See `BatchTimer`."""
        return self.timer.max_calls

    def time_batch(self, calls: int) -> TimedBatch:
        """See `BatchTimer`."""
        with self.other_side.pause():
            return self.timer.time_batch(calls)
