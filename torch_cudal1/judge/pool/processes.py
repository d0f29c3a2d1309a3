"""The processes that one lane lends to programs: one ahead, one that is lent again and again, one
for surprises.

A stranger's program has a process for itself. Programs of our own templates get one that others of
ours have left in order: a start takes 4 s beside a GPU, a program a fraction of that. Nothing here
is asked or judged; who has a process decides whether it is in order.
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

_SHARED_BYTES = 128 << 20  # of the GPU, with each process: inputs or results of one call
_MOST_LOANS = 64  # of one process, to programs of our own templates


class Processes:
    """Starts, lends and ends them. Use from one thread; `close` ends all that are not lent.

    `kept`: the process that may be lent again. `loans`: how often it was.
    """

    def __init__(self, terms: MeasurementSettings) -> None:
        self._terms = terms
        # Linux kills a child with the thread that started it, so these threads live as long as the
        # lane.
        self._starters = ThreadPoolExecutor(2, "cudal1-lane")
        self._fork_server: ForkServer | None = None
        self._next: Future[Child] | None = None
        self._second: Child | None = None  # lent again to what is measured again
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
        """A process of its own. The result raises SandboxError."""
        terms = self._terms
        limits = replace(
            make_limits(terms.settings, terms.device, trust=trust), threads=torch.get_num_threads()
        )
        if self._fork_server is None and terms.forked:
            self._fork_server = ForkServer(("triton",) if terms.device.type == "cuda" else ())
        return self._starters.submit(
            Child, limits, terms.contract, fork_server=self._fork_server, shared_bytes=_SHARED_BYTES
        )

    def begin(self) -> None:
        """Have one on its way for the next program."""
        if self.kept is None:
            self._next = self._next or self.start(self._terms.trust)

    def lend(self) -> Child:
        """One that has run nothing of a stranger, or nothing that went wrong of our own templates.
        Raises SandboxError.
        """
        return self._fresh() if self.kept is None else self.kept

    def take_back(self, child: Child, *, in_order: bool, doubtful: bool) -> None:
        """End it, or keep it where it is `in_order`. `doubtful`: unless it fails at a product, as
        it does where a kernel has taken the GPU's context with it.
        """
        loans, self.kept, self.loans = self.loans + 1, None, 0
        self._next = self._next or self.start(self._terms.trust)
        if self._terms.trust == "own" and in_order and child.usable and loans < _MOST_LOANS:
            try:
                if doubtful:
                    child.call("surroundings")
                child.call("clear", kept=True)
            except CandidateFailure:
                pass
            else:
                self.kept, self.loans = child, loans
                return
        child.close()

    def second(self) -> Child:
        """A new process for a surprise, or one that has run surprises of our own templates only.
        Raises SandboxError.
        """
        child, self._second = self._second or self._fresh(), None
        return child

    @contextmanager
    def keeping(self, second: Child) -> Iterator[Child]:
        """What `second` gave, for the body; one that our own templates left in order is lent again,
        any other ended.
        """
        try:
            yield second
            if self._terms.trust == "own":
                second.call("clear", kept=True)
                self._second = second
        finally:
            if self._second is not second:
                second.close()

    def empty(self) -> None:
        """Have those that are lent again give back the memory that they keep from program to
        program of one reference.
        """
        if self.kept is not None and not _cleared(self.kept):
            self.kept, self.loans = None, 0
        if self._second is not None and not _cleared(self._second):
            self._second = None

    def _fresh(self) -> Child:
        """The one that was started ahead. For a stranger's programs the next one starts now, for
        ours when the first of them is done: all lanes begin at once, and the driver makes one
        context after the other.
        """
        coming, self._next = self._next or self.start(self._terms.trust), None
        if self._terms.trust == "foreign":
            self._next = self.start(self._terms.trust)
        return coming.result()


def _cleared(child: Child) -> bool:
    """Whether a process could be made as new; it is ended where it could not."""
    try:
        child.call("clear")
    except CandidateFailure:
        child.close()
        return False
    return True
