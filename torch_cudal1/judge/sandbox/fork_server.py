"""Children of the judge without the wait: a process that has imported what every child imports
forks one whenever one is started.

What is forked has run nothing and touched no device, and goes through the same launcher
(supervisor, user, Landlock, filter) as a child that is started from nothing; only the start of the
interpreter and its imports, some seconds, are spared. The process that forks has the environment of
its children, so no secret of the user's is in the memory that a candidate inherits.

What it gives up: all of its children share one layout of addresses. So it serves code of our own
(`warm`), and training, where thousands of strangers' candidates are measured and none of their
results is stored for use; what a stranger wrote and is to be stored is judged in processes started
from nothing.
"""

from __future__ import annotations

import array
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import IO, Any

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.sandbox import cancellable
from torch_cudal1.judge.sandbox.confine.launch_plan import Plan
from torch_cudal1.judge.sandbox.filesystem_policy import environment
from torch_cudal1.judge.sandbox.start import make_scratch

__all__ = ["Forked", "Nursery"]

_MOST_BYTES = 1 << 20
_SERVER = "torch_cudal1.judge.worker.fork_server_main"
_START_S = 120.0
_ASKS_NVML = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1"
}  # an import that asks for GPUs must not start CUDA: no fork could use it then


class Forked:
    """A forked supervisor, spoken to as `sandbox` speaks to a `Popen`."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.status(self.pid)
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
    """The process that forks, seen from the judge. One request at a time, from any thread. Its
    children end with it.
    """

    def __init__(
        self, imports: Sequence[str] = (), *, own: bool = False, visible_gpu: bool = True
    ) -> None:
        """Start it. `imports`: modules beyond the judge's worker that its children find imported.
        Raises SandboxError.

        `own`, `visible_gpu`: whose code its children run, and whether they see GPUs, as of their
        limits.
        """
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._scratch = make_scratch("cudal1-nursery-")
        self._own, self._visible_gpu = own, visible_gpu
        self._variables = environment(self._scratch, own=own, visible_gpu=visible_gpu)
        command = [sys.executable, "-P", "-m", _SERVER, str(theirs.fileno()), *imports]
        variables = self._variables | _ASKS_NVML
        self.process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), env=variables, stdin=subprocess.DEVNULL
        )
        theirs.close()
        if (work := cancellable.current()) is not None:
            work.started(self.process)
        self._ours.settimeout(_START_S)
        try:
            self.pid = int(self._ask({"verb": "poll", "pid": 0})["nursery"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def serves(self, variables: Mapping[str, str]) -> bool:
        """Whether what it has imported is what a process with these variables would have: some
        modules read them once.

        Folders that were added to the end of the import path change nothing of that (setuptools
        adds one, and Inductor imports it).
        """
        if not self._own:
            return True
        before, now = (
            {**found, "PYTHONPATH": "", "TMPDIR": ""} for found in (self._variables, variables)
        )
        folders = [
            found.get("PYTHONPATH", "").split(os.pathsep) for found in (self._variables, variables)
        ]
        return before == now and folders[0] == folders[1][: len(folders[0])]

    def is_current(self) -> bool:
        """Whether it runs and is what would be started now."""
        return self.process.poll() is None and self.serves(
            environment(self._scratch, own=self._own, visible_gpu=self._visible_gpu)
        )

    def launch(
        self,
        plan: Plan,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        fds: Sequence[int],
        log: IO[bytes],
    ) -> Forked:
        """In the place of `start.launch`. Raises SandboxError."""
        (channel,) = fds
        own = replace(plan, parent=self.pid)
        module = command[command.index("-m") + 1]
        request = {
            "verb": "fork",
            "plan": own.to_json(),
            "variables": dict(variables),
            "worker": module,
        }
        return Forked(self, int(self._ask(request, (channel, log.fileno()))["pid"]))

    def status(self, pid: int) -> int | None:
        """Exit status of a child, None while it runs; -SIGKILL if the nursery itself is gone, for
        its children are then too.
        """
        try:
            found: int | None = self._ask({"verb": "poll", "pid": pid})["status"]
        except SandboxError:
            return -signal.SIGKILL
        return found

    def close(self) -> None:
        """End it and its children. Safe to call twice."""
        self._ours.close()
        self.process.terminate()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with self._lock:
            try:
                self._ours.sendmsg([json.dumps(request).encode()], ancillary)
                answer: dict[str, Any] = json.loads(self._ours.recv(_MOST_BYTES))
            except (OSError, ValueError) as error:
                raise SandboxError(
                    "starting", f"the process that forks children is gone: {error}"
                ) from error
        return answer
