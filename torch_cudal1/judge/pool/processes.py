"""The candidates' processes of one slot: one started ahead, one used again and again, one that
confirms surprising scores.

A foreign program gets its own process. Own programs share one, as long as each leaves it in order:
a start takes 4 s on a GPU, a program a fraction of that. The user of a process decides whether it
is in order; this module sends no programs and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch

from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits
from torch_cudal1.judge.sandbox.fork_server import ForkServer
from torch_cudal1.judge.sandbox.limits import Trust

__all__ = ["Processes"]

# GPU memory shared with each process: inputs or results of one call.
_SHARED_BYTES = 128 << 20
# Of one process, to own programs.
_MOST_LOANS = 64


class Processes:
    """Starts, lends and ends processes. Use it from one thread; `close` ends those not lent.

    `kept`: the process that may be lent again. `loans`: how often it was lent.
    """

    def __init__(self, config: MeasurementSettings) -> None:
        self._config = config
        # Linux kills a child when the thread that started it ends, so these threads live as long as
        # the slot.
        self._starters = ThreadPoolExecutor(2, "cudal1-slot")
        self._fork_server: ForkServer | None = None
        self._next: Future[Child] | None = None
        # For programs that are measured again.
        self._second: Child | None = None
        self.kept: Child | None = None
        self.loans = 0

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        if self._next is not None and self._next.exception() is None:
            self._next.result().close()
        for child in (self.kept, self._second):
            if child is not None:
                child.close()
        if self._fork_server is not None:
            self._fork_server.close()
        self._next = self.kept = self._second = self._fork_server = None
        self._starters.shutdown()

    def start(self, trust: Trust) -> Future[Child]:
        """Start a process; the future raises SandboxError where that fails."""
        config = self._config
        limits = replace(
            make_limits(config.settings, config.device, trust=trust, has_compile_pool=False),
            threads=torch.get_num_threads(),
        )
        if self._fork_server is None and config.forked:
            self._fork_server = ForkServer(("triton",) if config.device.type == "cuda" else ())
        return self._starters.submit(
            Child,
            limits,
            config.contract,
            fork_server=self._fork_server,
            shared_bytes=_SHARED_BYTES,
        )

    def begin(self) -> None:
        """Start a process for the next program, unless there is one."""
        if self.kept is None:
            self._next = self._next or self.start(self._config.trust)

    def lend(self) -> Child:
        """A process for one program: a new one, or one that own programs left in order. Raises
        SandboxError.
        """
        return self._take_next() if self.kept is None else self.kept

    def take_back(self, child: Child, *, in_order: bool, doubtful: bool) -> None:
        """End a process, or keep it if it is `in_order`.

        `doubtful`: test it first with a matrix product, which fails where a kernel has destroyed
        the CUDA context.
        """
        loans, self.kept, self.loans = self.loans + 1, None, 0
        self._next = self._next or self.start(self._config.trust)
        if self._config.trust == "own" and in_order and child.usable and loans < _MOST_LOANS:
            try:
                if doubtful:
                    # Reading the global state runs a small product on the GPU.
                    child.call("surroundings")
                # Memory is kept, as a new tensor of 32 MiB costs 20 ms of turns on the GPU, but
                # overwritten: the next program must find no result in it.
                child.call("clear", kept=True)
            # Not in order after all: it is ended below.
            except CandidateFailure:
                pass
            else:
                self.kept, self.loans = child, loans
                return
        child.close()

    def take_second(self) -> Child:
        """A process to confirm a surprising score: a new one, or one that ran only such programs of
        own code. Raises SandboxError.
        """
        child, self._second = self._second or self._take_next(), None
        return child

    @contextmanager
    def lend_second(self, second: Child) -> Iterator[Child]:
        """Lend the process of `take_second` for the body. It is kept if an own program left it in
        order, else ended.
        """
        try:
            yield second
            if self._config.trust == "own":
                second.call("clear", kept=True)
                self._second = second
        finally:
            # Not kept: a foreign program ran in it, or the body or the clearing failed.
            if self._second is not second:
                second.close()

    def free_gpu_memory(self) -> None:
        """Have the kept processes free the GPU memory that they keep between programs of one
        reference.
        """
        if self.kept is not None and not _clear(self.kept):
            self.kept, self.loans = None, 0
        if self._second is not None and not _clear(self._second):
            self._second = None

    def _take_next(self) -> Child:
        """The process that was started ahead."""
        starting, self._next = self._next or self.start(self._config.trust), None
        # For own programs the next one starts when the first is done: all slots begin at once, and
        # the driver makes one context after the other.
        if self._config.trust == "foreign":
            self._next = self.start(self._config.trust)
        return starting.result()


def _clear(child: Child) -> bool:
    """Whether a process could be cleared; it is ended where it could not."""
    try:
        child.call("clear")
    except CandidateFailure:
        child.close()
        return False
    return True
