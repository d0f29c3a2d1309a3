"""Stops, continues and ends a process with everything it started, in whatever session. Linux only.

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

__all__ = [
    "STACK_SIGNAL",
    "Process",
    "continue_tree",
    "die_with_parent",
    "kill_tree",
    "list_process_tree",
    "locate_process",
    "stop_tree",
]

STACK_SIGNAL = signal.SIGUSR1

_MAX_STOP_PASSES = 3  # a process may start another one while its family is being listed
_KILL_WAIT_S = 5.0
_MAX_STACK_WAIT_S, _STACK_POLL_S = 2.0, 0.05
_PACKAGE = "torch_cudal1"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have this process killed when the thread that started it ends, for whatever reason. Raises
    OSError.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def list_process_tree(pid: int) -> list[int]:
    """The process and its living descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _read_parent_pid(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    pids = [pid]
    for process_id in pids:
        pids += children.get(process_id, [])
    return pids


def stop_tree(pid: int) -> None:
    """Stop a process and its descendants, including those that start while it is being stopped."""
    stopped: set[int] = set()
    for _ in range(_MAX_STOP_PASSES):
        running = [process_id for process_id in list_process_tree(pid) if process_id not in stopped]
        if not running:
            return
        for process_id in running:
            _send_signal(process_id, signal.SIGSTOP)
        stopped.update(running)


def continue_tree(pid: int) -> None:
    """Continue them all, children first: a parent must not wake to a pipe whose other side is
    stopped.
    """
    for process_id in reversed(list_process_tree(pid)):
        _send_signal(process_id, signal.SIGCONT)


class Process(Protocol):
    """What `kill_tree` needs of a process."""

    @property
    def pid(self) -> int:
        """Process number."""

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""

    def wait(self, timeout: float) -> int:
        """The same when it has ended. Raises subprocess.TimeoutExpired."""


def locate_process(process: Process, log: Path) -> str:
    """What a task's process is doing, its innermost frame and the package's; "" where it does not
    say.

    The process writes its frames into `log` when it is sent `STACK_SIGNAL`. A process without a
    handler for that signal ends by it.
    """
    before = log.stat().st_size
    _send_signal(process.pid, STACK_SIGNAL)
    deadline = time.monotonic() + _MAX_STACK_WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(_STACK_POLL_S)
        new_lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
        if frames := [line for line in new_lines if line.startswith("  File ")]:
            package_frames = [frame for frame in frames if f"/{_PACKAGE}/" in frame]
            return ", of ".join(
                dict.fromkeys(
                    frame.rpartition("/")[2].replace('"', "")
                    for frame in (frames[0], *package_frames[:1])
                )
            )
    return ""


def kill_tree(process: Process) -> None:
    """Kill a process and all it started, and wait for it. Safe to call twice."""
    if process.poll() is not None:
        return
    for process_id in list_process_tree(process.pid):
        _send_signal(process_id, signal.SIGKILL)
    try:
        process.wait(_KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        return  # in an uninterruptible driver call: it dies when that returns


def _read_parent_pid(entry: Path) -> int | None:
    try:
        stat_line = (entry / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None  # it has ended meanwhile
    return int(stat_line.rpartition(")")[2].split()[1])


def _send_signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended meanwhile
