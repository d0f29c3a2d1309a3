"""The two processes in which sources are evaluated: the reference's, which stays for the next
candidate of the same reference, and the candidate's, which ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.evaluate.source_baselines import Baselines
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceReference, read_reference
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits
from torch_cudal1.judge.sandbox.fork_server import ForkServer
from torch_cudal1.judge.sandbox.limits import Trust

__all__ = ["RunningReference", "SourceProcesses"]


@dataclass
class RunningReference:
    """A reference in its process: what it computes, its examples, and its baselines once they have
    been benchmarked.
    """

    reference: SourceReference
    examples: list[torch.Tensor]
    baselines: Baselines | None = None


class SourceProcesses:
    """The reference's process, and one for each candidate.

    `trust`: in the reference; a candidate is never trusted. `ahead`: start the next candidate's
    process while this one's is in use. `fork_server`: forks them all; None: new interpreters.
    """

    def __init__(
        self,
        settings: Settings,
        contract: Contract,
        device: torch.device,
        *,
        trust: Trust,
        ahead: bool,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._settings, self._contract, self._device = settings, contract, device
        self._trust, self._ahead, self._fork_server = trust, ahead, fork_server
        # Linux kills a child with the thread that started it: these threads live as long as this
        # object. Two, so that the candidate's and the reference's process start at the same time.
        self._pool = ThreadPoolExecutor(2, "cudal1-judge")
        self._next: Future[Child] | None = None
        self._oracle: Child | None = None
        self._loaded: RunningReference | None = None

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        self._close_reference()
        if self._next is not None:
            _close(self._next)
            self._next = None
        self._pool.shutdown()

    def wait_for_next(self) -> None:
        """Wait until no process is starting."""
        if self._next is not None:
            wait([self._next])

    def take_next(self) -> Child | None:
        """The process that was started ahead, which is the caller's to close from now on; None where
        there is none.
        """
        starting, self._next = self._next, None
        # The system may have killed it for memory while it waited.
        return starting.result() if starting and _is_responsive(starting.result()) else None

    @contextmanager
    def open(
        self, text: str, step: Callable[[str], AbstractContextManager[None]]
    ) -> Iterator[tuple[Child, RunningReference]]:
        """A new child for a candidate, with the process of the reference `text` beside it. `step`
        reports what is done.
        """
        # A stranger's reference could leave something behind for the next one: its process serves
        # one only.
        is_loaded = self._loaded is not None and self._loaded.reference.text == text
        if (
            self._oracle is None
            or not self._oracle.usable
            or (self._trust == "foreign" and not is_loaded)
        ):
            self._close_reference()
        with step("start"):
            # A process that was started ahead is used once: a candidate's process never meets a
            # second one.
            starting, self._next = self._next or self._start("foreign"), None
            try:
                self._oracle = self._oracle or self._start(self._trust).result()
                # The system may have killed it for memory while it waited.
                if not _is_responsive(starting.result()):
                    starting = self._start("foreign")
                child = starting.result()
            # Any exception, KeyboardInterrupt included: a process that nothing refers to would stay
            # alive.
            except BaseException:
                _close(starting)
                raise
        with child:
            if self._loaded is None or not is_loaded:
                with step("reference"):
                    self._loaded = _load_reference(self._oracle, text, self._device)
            self._next = self._start("foreign") if self._ahead else None
            yield child, self._loaded

    def restart_reference(self, text: str) -> RunningReference:
        """The reference in a new process, for a baseline has ended its own."""
        self._close_reference()
        self._oracle = self._start(self._trust).result()
        self._loaded = _load_reference(self._oracle, text, self._device)
        return self._loaded

    def _start(self, trust: Trust) -> Future[Child]:
        return self._pool.submit(
            Child,
            make_limits(self._settings, self._device, trust=trust, has_compile_pool=False),
            self._contract,
            fork_server=self._fork_server,
        )

    def _close_reference(self) -> None:
        if self._oracle is not None:
            self._oracle.close()
        self._oracle, self._loaded = None, None


def _load_reference(oracle: Child, text: str, device: torch.device) -> RunningReference:
    try:
        subject, examples = read_reference(oracle, text, device)
    except SandboxError as error:
        raise ReferenceFailure(error.stage, error.found) from error
    # Without a tensor there is nothing to compare.
    if not any(subject.outputs):
        raise ReferenceFailure(
            "running the reference", f"its result holds no tensor: {subject.tree[:200]}"
        )
    # No candidate can be compared with it: its second call on the same tensors is another question.
    if written := subject.find_written_inputs():
        raise ReferenceFailure(
            "running the reference",
            f"its forward writes to argument {written[0]}; let it write to a copy",
        )
    return RunningReference(subject, examples)


def _is_responsive(child: Child) -> bool:
    """Whether a process that has seen nothing yet answers; one that does not is closed."""
    # The cheapest request there is: nothing is dropped.
    try:
        child.call("drop", names=[])
    except CandidateFailure:
        child.close()
        return False
    return True


def _close(starting: Future[Child]) -> None:
    """Close a child that may still be starting."""
    # `exception` waits until the start has ended. A start that failed has left no process.
    if starting.exception() is None:
        starting.result().close()
