"""Watches one process: keeps the end of what it prints, and when it ends or is told to, kills
everything it ever started.

Processes that leave their group or session are found too: a subreaper inherits every orphan below
it, and waits until it has none. What sits in an uninterruptible driver call outlives this by as
long as the call lasts.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

__all__ = ["Supervisor", "end_like", "kill_descendants", "list_descendants"]

_TAIL_BYTES = 64 << 10
_PATIENCE_S = 3.0
_POLITE_S = 1.5


@dataclass
class Supervisor:
    """The state of a supervisor. `wake` is readable when a child ended or SIGTERM came; make it
    before the first fork.

    `polite`: what the worker started (a compiler's pool, which has semaphores to remove) may end by
    itself for a moment.
    """

    polite: bool = False
    wake: tuple[int, int] = field(default_factory=os.pipe)
    told: bool = False
    tail: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        for fd in self.wake:
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, *_: object) -> None:
        self.told = True

    def until_end(self, worker: int, output: int) -> int:
        """The wait status of `worker`, which writes to the pipe `output`; that of SIGKILL if it had
        to be killed.
        """
        os.set_blocking(output, False)
        status = None
        sources = [self.wake[0], output]
        while status is None and not self.told:
            ready, _, _ = select.select(sources, [], [])
            if output in ready and not self._read(output):
                sources.remove(output)  # it closed its output, which is no crime
            if self.wake[0] in ready:
                os.read(self.wake[0], 4096)
                status = _reap(worker)
        if self.polite:
            if status is None:
                os.kill(
                    worker, signal.SIGKILL
                )  # it is not reaped yet, so the number is still its own
            status = _alone(worker, status)
        killed = kill_descendants(worker)
        self._drain(output)
        return status if status is not None else killed

    def _read(self, output: int) -> bool:
        try:
            part = os.read(output, 1 << 16)
        except BlockingIOError:
            return True
        self.tail += part
        del self.tail[:-_TAIL_BYTES]
        return bool(part)

    def _drain(self, output: int) -> None:
        for _ in range(64):  # a pipe holds at most a mebibyte unless enlarged
            if not select.select([output], [], [], 0)[0] or not self._read(output):
                return


def _alone(worker: int, status: int | None) -> int | None:
    """Wait a moment until nobody else is left; the wait status of `worker`, if it ended now or
    before.
    """
    until = time.monotonic() + _POLITE_S
    while time.monotonic() < until:
        ended = _reap(worker)
        status = ended if ended is not None else status
        if not list_descendants(os.getpid()):
            break
        time.sleep(0.02)
    return status


def list_descendants(root: int) -> set[int]:
    """Every living process below `root`."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            rest = path.read_text(errors="replace").rpartition(")")[2].split()
            if rest[0] != "Z":
                parents[int(path.parent.name)] = int(rest[1])
    descendants: set[int] = set()
    generation = {root}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation} - descendants
        descendants |= generation
    return descendants


def kill_descendants(worker: int) -> int:
    """Kill every descendant of this process until none is left to wait for; the wait status of
    `worker`, else SIGKILL's.
    """
    status = int(signal.SIGKILL)
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        for signal_number in (
            signal.SIGSTOP,
            signal.SIGKILL,
        ):  # a stopped process starts no other while its brothers are killed
            for pid in list_descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal_number)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == worker else status
        except ChildProcessError:
            return status  # nobody is left: orphans would have come to us
        time.sleep(0.005)
    return status


def end_like(status: int) -> NoReturn:
    """End this process as another ended, so that whoever waits for this one sees what happened to
    that one.
    """
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(1.0)
    os._exit(code if code >= 0 else 128 - code)


def _reap(worker: int) -> int | None:
    """Collect all that ended; the wait status of `worker` if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == worker else status
    return status
