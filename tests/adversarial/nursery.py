"""Children of the judge without the wait: a process that has imported what every child imports forks one whenever one is started.

What is forked has run nothing and touched no device, and goes through the same launcher (supervisor, user, Landlock, filter) as a
child that is started from nothing; only the start of the interpreter and its imports, some seconds, are spared. `forked_children`
puts it in the place of `sandbox.launch`. The tests of the sandbox itself do without.
"""

from __future__ import annotations

import array
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any, NoReturn

import pytest

from torch_cudal1.confine import __main__ as launcher
from torch_cudal1.confine.plan import Plan
from torch_cudal1.judge import sandbox, worker

__all__ = ["forked_children"]

_MOST_BYTES = 1 << 20
_FORK, _POLL = "fork", "poll"


class Forked:
    """A forked supervisor, spoken to as `sandbox` speaks to a `Popen`."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid, self.returncode = nursery, pid, None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"verb": _POLL, "pid": self.pid})["status"]
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The same when it has ended. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked child", timeout)
            time.sleep(0.002)
        return status

    def terminate(self) -> None:
        """SIGTERM: the supervisor kills everything and ends."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The process that forks, seen from the judge. One request at a time, from any thread."""

    def __init__(self) -> None:
        import threading

        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env={**os.environ, "PYTHONPATH": paths})
        theirs.close()
        self.pid = self.ask({"verb": _POLL, "pid": 0})["nursery"]

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request with descriptors; its answer."""
        with self._lock:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            self._ours.sendmsg([json.dumps(request).encode()], ancillary)
            answer: dict[str, Any] = json.loads(self._ours.recv(_MOST_BYTES))
            return answer

    def launch(
        self, plan: Plan, command: Sequence[str], variables: Mapping[str, str], *, fds: Sequence[int], log: IO[bytes]
    ) -> Forked:
        """In the place of `start.launch`."""
        (channel,) = fds
        own = replace(plan, parent=self.pid)
        module = command[command.index("-m") + 1]
        request = {"verb": _FORK, "plan": own.to_json(), "variables": dict(variables), "worker": module}
        return Forked(self, self.ask(request, (channel, log.fileno()))["pid"])

    def close(self) -> None:
        """Its children end with it."""
        self._ours.close()
        self._process.wait()


@contextmanager
def forked_children() -> Iterator[None]:
    """Every child that is started within the block is forked. Linux ends the nursery's children with it."""
    nursery = Nursery()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sandbox, "launch", nursery.launch)
            yield
    finally:
        nursery.close()


def _serve(channel: socket.socket) -> None:
    statuses: dict[int, int] = {}
    while True:
        text, fds, _, _ = socket.recv_fds(channel, _MOST_BYTES, 2)
        if not text:
            return
        request = json.loads(text)
        if request["verb"] == _FORK:
            importlib.import_module(request["worker"])  # once here, rather than in every child
            pid = os.fork()
            if not pid:
                channel.close()
                _become(request, *fds)
            for fd in fds:
                os.close(fd)
            answer = {"pid": pid}
        else:
            _reap(statuses)
            answer = {"status": statuses.get(request["pid"]), "nursery": os.getpid()}
        channel.send(json.dumps(answer).encode())


def _reap(statuses: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        statuses[pid] = os.waitstatus_to_exitcode(status)


def _become(request: Mapping[str, Any], channel: int, log: int) -> NoReturn:
    """The supervisor, and in its fork the worker: where the launcher would execute a new interpreter, this one goes on."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    plan = Plan.from_json(request["plan"])
    os.chdir(plan.scratch)
    os.environ.clear()
    os.environ.update(request["variables"])
    tempfile.tempdir = None  # an import here may have asked for it: the child has its own
    execute = os.execv

    def go_on(path: str, command: list[str]) -> None:
        os.execv = execute
        os.close(log)
        sys.argv = command
        try:
            worker.main(channel, importlib.import_module(request["worker"]).VERBS)
        finally:
            os._exit(1)
        os._exit(0)

    os.execv = go_on  # type: ignore[assignment]
    launcher.main(plan, ["worker"])


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
