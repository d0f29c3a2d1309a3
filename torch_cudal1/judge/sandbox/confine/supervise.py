"""Supervises one process: keeps the end of its output, and kills every process that it started,
when it ends or SIGTERM comes.

It finds processes that left their group or session too: a subreaper becomes the parent of every
orphan below it. A process in an uninterruptible driver call outlives the supervisor until that call
returns.
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

# A candidate may print without end.
_TAIL_BYTES = 64 << 10
# A process in an uninterruptible driver call does not die before the call returns.
_PATIENCE_S = 3.0
_POLITE_S = 1.5


@dataclass
class Supervisor:
    """The state of a supervisor. Construct it before the first fork.

    - polite: processes that the worker started get 1.5 s to end by themselves: a compiler's pool
      has semaphores to remove.
    - wake: a pipe, readable when a child ended or SIGTERM came.
    - is_terminated: whether SIGTERM came. tail: the last 64 KiB of the worker's output.
    """

    polite: bool = False
    wake: tuple[int, int] = field(default_factory=os.pipe)
    is_terminated: bool = False
    tail: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        # signal.set_wakeup_fd demands a descriptor that does not block.
        for fd in self.wake:
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        # Python writes to the wake-up pipe only for signals that have a handler. With the pipe, a
        # signal just before select is not missed.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._note_sigterm)

    def _note_sigterm(self, *_: object) -> None:
        self.is_terminated = True

    def wait_for_end(self, worker: int, output: int) -> int:
        """Wait until `worker`, which writes to the pipe `output`, ends or SIGTERM comes; then kill
        all it started.

        Returns its wait status, that of SIGKILL if it had to be killed.
        """
        os.set_blocking(output, False)
        status = None
        sources = [self.wake[0], output]
        while status is None and not self.is_terminated:
            ready, _, _ = select.select(sources, [], [])
            if output in ready and not self._read(output):
                # The worker may close its output and go on; select would report the end at once,
                # forever.
                sources.remove(output)
            if self.wake[0] in ready:
                os.read(self.wake[0], 4096)
                status = _reap(worker)
        if self.polite:
            if status is None:
                # It is not reaped yet, so its number cannot belong to another process.
                os.kill(worker, signal.SIGKILL)
            status = _wait_for_descendants(worker, status)
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
        # A bound, as a survivor may still write. A user may enlarge a pipe to 1 MiB at most
        # (pipe-max-size); a read takes up to 64 KiB.
        for _ in range(64):
            if not select.select([output], [], [], 0)[0] or not self._read(output):
                return


def _wait_for_descendants(worker: int, status: int | None) -> int | None:
    """Wait at most 1.5 s until this process has no descendants; the wait status of `worker`, None
    while it lives.
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
    """Process ids of all living descendants of `root`."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # The name of the program, in parentheses, may itself hold spaces and parentheses.
            rest = path.read_text(errors="replace").rpartition(")")[2].split()
            # A zombie has ended, and no signal changes that.
            if rest[0] != "Z":
                parents[int(path.parent.name)] = int(rest[1])
    descendants: set[int] = set()
    generation = {root}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation} - descendants
        descendants |= generation
    return descendants


def kill_descendants(worker: int) -> int:
    """Kill every descendant of this process and reap them, for at most 3 s; the wait status of
    `worker` if it is reaped here, else SIGKILL's.
    """
    status = int(signal.SIGKILL)
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        # A stopped process cannot fork while the others are being killed.
        for signal_number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in list_descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal_number)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == worker else status
        # No child is left, and so no descendant: orphans become children of this subreaper.
        except ChildProcessError:
            return status
        time.sleep(0.005)
    return status


def end_like(status: int) -> NoReturn:
    """End this process with the exit status or the signal of `status`, so that its parent sees how
    the worker ended.
    """
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # The kernel refuses to set these two.
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        # The signal may be delivered a little later, or be one that does not end a process.
        time.sleep(1.0)
    os._exit(code if code >= 0 else 128 - code)


def _reap(worker: int) -> int | None:
    """Reap all children that have ended; the wait status of `worker` if it is one of them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == worker else status
    return status
