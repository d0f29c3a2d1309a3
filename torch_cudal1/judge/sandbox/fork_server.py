"""Starts children of the judge by forking a server that has imported what every child needs.

A forked child has run no candidate and touched no device. It goes through the same launcher
(supervisor, user, Landlock, filter) as a child with a new interpreter, and saves only the start of
the interpreter and its imports, some seconds. The server has the environment of its children, so
the memory that a candidate inherits holds no secret of the user.

All its children share one address layout. So it serves own code (`worker_pool`), and training,
where thousands of foreign candidates are measured and no result of theirs is stored for use.
Foreign code whose result is stored is validated in processes with a new interpreter.

`multiprocessing`'s fork server is not used: it unpickles its requests, and has no launcher.
"""

from __future__ import annotations

import array
import json
import os
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
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan
from torch_cudal1.judge.sandbox.filesystem_policy import make_environment
from torch_cudal1.judge.sandbox.scratch import make_scratch, remove_scratch

__all__ = ["ForkServer", "ForkedProcess"]

_MAX_ANSWER_BYTES = 1 << 20
_SERVER_MODULE = "torch_cudal1.judge.worker.fork_server_main"
_START_S = 120.0
# An import that counts GPUs must not start CUDA in the server: no fork could use CUDA then.
_COUNT_GPUS_BY_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class ForkedProcess:
    """The supervisor of a forked child, with the `subprocess.Popen` methods that `child` uses."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self._fork_server, self.pid = fork_server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._fork_server.status(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait at most `timeout` seconds for its exit status. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked child", timeout)
            # Only the parent of a process can wait for it, and that is the server: this side polls.
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


class ForkServer:
    """The parent's end of a fork server: one request at a time, from any thread.

    The children end with the server.
    """

    def __init__(
        self, imports: Sequence[str] = (), *, own: bool = False, visible_gpu: bool = True
    ) -> None:
        """Start it. Raises SandboxError.

        - imports: modules to import beyond the judge's worker.
        - own: its children run own code. visible_gpu: they see the GPUs.
        """
        # SEQPACKET keeps messages apart, so file descriptors arrive with their request.
        self._socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._scratch = make_scratch()
        self._own, self._visible_gpu = own, visible_gpu
        self._variables = make_environment(self._scratch, own=own, visible_gpu=visible_gpu)
        command = [
            sys.executable,
            "-P",
            "-m",
            _SERVER_MODULE,
            str(server_socket.fileno()),
            *imports,
        ]
        variables = self._variables | _COUNT_GPUS_BY_NVML
        self.process = subprocess.Popen(
            command, pass_fds=(server_socket.fileno(),), env=variables, stdin=subprocess.DEVNULL
        )
        # With this copy open, the death of the server would not end the stream.
        server_socket.close()
        if (scope := cancellable.current_scope()) is not None:
            scope.add_process(self.process)
        self._socket.settimeout(_START_S)
        try:
            self.pid = int(self._ask({"verb": "poll", "pid": 0})["server"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def serves(self, variables: Mapping[str, str]) -> bool:
        """Whether a fork is like a new process with these variables: some modules read variables
        only when they are imported.
        """
        if not self._own:
            return True
        before, now = (
            {**environ, "PYTHONPATH": "", "TMPDIR": ""} for environ in (self._variables, variables)
        )
        # Folders added at the end of the import path change nothing that was imported. Inductor
        # imports setuptools, which adds one.
        folders_before, folders_now = (
            environ.get("PYTHONPATH", "").split(os.pathsep)
            for environ in (self._variables, variables)
        )
        return before == now and folders_before == folders_now[: len(folders_before)]

    def is_current(self) -> bool:
        """Whether it runs, with the environment that a server started now would have."""
        return self.process.poll() is None and self.serves(
            make_environment(self._scratch, own=self._own, visible_gpu=self._visible_gpu)
        )

    def launch(
        self,
        plan: LaunchPlan,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        fds: Sequence[int],
        log: IO[bytes],
    ) -> ForkedProcess:
        """Fork a child; the arguments are those of `start.launch_process`. Raises SandboxError."""
        (channel,) = fds
        # The launcher checks its parent, which is the server here.
        forked_plan = replace(plan, parent=self.pid)
        module = command[command.index("-m") + 1]
        request = {
            "verb": "fork",
            "plan": forked_plan.to_json(),
            "variables": dict(variables),
            "worker": module,
        }
        return ForkedProcess(self, int(self._ask(request, (channel, log.fileno()))["pid"]))

    def status(self, pid: int) -> int | None:
        """Exit status of a child, None while it runs; -SIGKILL if the server is gone: its children
        end with it.
        """
        try:
            status: int | None = self._ask({"verb": "poll", "pid": pid})["status"]
        except SandboxError:
            return -signal.SIGKILL
        return status

    def close(self) -> None:
        """End it and its children. Safe to call twice."""
        self._socket.close()
        self.process.terminate()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        remove_scratch(self._scratch)

    def _ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        # Requests of several threads would take one another's answers.
        with self._lock:
            try:
                self._socket.sendmsg([json.dumps(request).encode()], ancillary)
                answer: dict[str, Any] = json.loads(self._socket.recv(_MAX_ANSWER_BYTES))
            except (OSError, ValueError) as error:
                raise SandboxError(
                    "starting", f"the process that forks children is gone: {error}"
                ) from error
        return answer
