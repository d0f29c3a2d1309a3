"""Stops, continues and ends a process with everything it started, whatever sessions those made for
themselves. Linux only.

Only descendants of processes that the caller started are ever touched.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Protocol

__all__ = ["WHERE", "Process", "die_with_parent", "end", "family", "freeze", "thaw", "where"]

WHERE = signal.SIGUSR1

_PASSES = 3  # a process may start another one while its family is being listed
_GRACE_S = 5.0
_TELLING_S, _LOOK_S = 2.0, 0.05
_OURS = "torch_cudal1"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on this process is killed when the thread that started it ends, however that comes
    about. Raises OSError.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def family(pid: int) -> list[int]:
    """The process and its living descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def freeze(pid: int) -> None:
    """Stop them all, and whatever they started before they were stopped."""
    stopped: set[int] = set()
    for _ in range(_PASSES):
        found = [one for one in family(pid) if one not in stopped]
        if not found:
            return
        for one in found:
            _signal(one, signal.SIGSTOP)
        stopped.update(found)


def thaw(pid: int) -> None:
    """Let them all go on, children first: none of them is to find the other side of a pipe asleep."""
    for one in reversed(family(pid)):
        _signal(one, signal.SIGCONT)


class Process(Protocol):
    """What `end` asks of a process."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""

    def wait(self, timeout: float) -> int:
        """The same when it has ended. Raises subprocess.TimeoutExpired."""


def where(process: Process, log: Path) -> str:
    """What a task's process is doing, its innermost frame and the package's; "" where it does not
    say.

    The process writes its frames into `log` when it is sent `WHERE`. One that has not asked for
    that signal ends by it.
    """
    before = log.stat().st_size
    _signal(process.pid, WHERE)
    deadline = time.monotonic() + _TELLING_S
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(_LOOK_S)
        told = log.read_bytes()[before:].decode(errors="replace").splitlines()
        if frames := [line for line in told if line.startswith("  File ")]:
            ours = [frame for frame in frames if f"/{_OURS}/" in frame]
            return ", of ".join(
                dict.fromkeys(
                    frame.rpartition("/")[2].replace('"', "") for frame in (frames[0], *ours[:1])
                )
            )
    return ""


def end(process: Process) -> None:
    """Kill it and all it started, and wait for it. Safe to call twice."""
    if process.poll() is not None:
        return
    for one in family(process.pid):
        _signal(one, signal.SIGKILL)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        return  # in an uninterruptible driver call: it dies when that returns


def _parent(entry: Path) -> int | None:
    try:
        told = (entry / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None  # it has ended meanwhile
    return int(told.rpartition(")")[2].split()[1])


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended meanwhile
