"""Processes of tasks without the wait for imports: one process imports everything that a task
needs, and every task's process is forked from it.

The template runs nothing itself and never touches a device, so a forked process is like a new one;
the start of an interpreter, its imports and the probe of the sandbox, some seconds each, are paid
once a run. `Template` is the run's end, `python -m benchmarks.kernelbench.template FD DEVICE` the
other. Where a forked process cannot use the device, `Template` raises NoTemplate with the reason.
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
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NoReturn

from benchmarks.kernelbench.processes import die_with_parent
from torch_cudal1.judge.worker.fork_server_main import reap

__all__ = ["ForkedProcess", "NoTemplate", "Template"]

_IMPORTS = (
    "benchmarks.kernelbench.child",
    "torch_cudal1.search.tune",
    "torch_cudal1.search.strategy",
    "torch_cudal1.api.accelerate",
)
_COMPILERS = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.triton",
    "torch._functorch.aot_autograd",
)
_MAX_MESSAGE_BYTES = 1 << 16
_MAX_START_S, _MAX_ANSWER_S, _POLL_S = 180.0, 30.0, 0.01


class NoTemplate(RuntimeError):
    """No process can be forked for tasks here; each must be started from nothing."""


class ForkedProcess:
    """A forked process, with the interface of `Popen` that the run uses."""

    def __init__(self, template: Template, pid: int) -> None:
        self._template, self.pid = template, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._template.status(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The same when it has ended. Raises subprocess.TimeoutExpired."""
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a task", timeout)
            time.sleep(_POLL_S)
        return status


class Template:
    """The process that forks, seen from the run. Its children end with it, and it ends with the
    run.
    """

    def __init__(
        self, device: str, environment: Mapping[str, str], folder: Path, log: Path
    ) -> None:
        """Start the process, and try whether a forked one can use `device`. Raises NoTemplate."""
        self._channel, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __spec__.name, str(child_end.fileno()), device]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
            )
        child_end.close()
        self._channel.settimeout(_MAX_START_S)
        try:
            problem = str(self._ask({"verb": "try"})["problem"])
        except NoTemplate as error:
            problem = str(error)
        if problem:
            self.close()
            raise NoTemplate(
                f"{problem}; {log.name}: {log.read_text(errors='replace').strip()[-300:]}"
            )
        self._channel.settimeout(_MAX_ANSWER_S)

    def start(self, spec: Path, line: int, log: IO[bytes]) -> ForkedProcess:
        """A task's process: `line` is its end of the pipe. Raises NoTemplate."""
        answer = self._ask({"verb": "start", "spec": str(spec)}, (line, log.fileno()))
        return ForkedProcess(self, int(str(answer["pid"])))

    def status(self, pid: int) -> int | None:
        """Exit status of a child, None while it runs; -SIGKILL if the template itself is gone,
        because its children end with it.
        """
        try:
            exit_status = self._ask({"verb": "poll", "pid": pid})["status"]
        except NoTemplate:
            return -signal.SIGKILL
        return None if exit_status is None else int(str(exit_status))

    def close(self) -> None:
        """End it and its children. Safe to call twice."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, request: Mapping[str, object], fds: tuple[int, ...] = ()) -> dict[str, object]:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._channel.sendmsg([json.dumps(request).encode()], ancillary)
            answer: dict[str, object] = json.loads(self._channel.recv(_MAX_MESSAGE_BYTES))
        except (OSError, ValueError) as error:
            raise NoTemplate(f"the process that forks is gone or hangs: {error}") from error
        return answer


def _serve(channel: socket.socket, device: str) -> None:
    die_with_parent()
    for name in (*_IMPORTS, *_COMPILERS):
        importlib.import_module(name)
    _probe_sandbox(device)
    statuses: dict[int, int] = {}
    while True:
        text, fds, _, _ = socket.recv_fds(channel, _MAX_MESSAGE_BYTES, 2)
        if not text:
            return
        request = json.loads(text)
        answer: dict[str, object]
        if request["verb"] == "try":
            answer = {"problem": _find_device_problem(device)}
        elif request["verb"] == "start":
            answer = {"pid": _fork(channel, Path(request["spec"]), *fds)}
        else:
            reap(statuses)
            answer = {"status": statuses.pop(int(request["pid"]), None)}
        channel.send(json.dumps(answer).encode())


def _probe_sandbox(device: str) -> None:
    """Find out once, for all tasks, what the sandbox can confine here."""
    import torch

    from torch_cudal1.core.settings import Settings
    from torch_cudal1.judge.sandbox.limits import make_limits
    from torch_cudal1.judge.sandbox.probe import find_levels

    for visible in (True, False):
        find_levels(make_limits(Settings(), torch.device(device), visible_gpu=visible))


def _find_device_problem(device: str) -> str:
    """Why a forked process cannot calculate on the device, "" if it can: the imports of this
    process must not have touched the driver.
    """
    pid = os.fork()
    if not pid:
        code = 1
        try:
            import torch

            code = int(float(torch.ones(2, device=device).sum()) != 2.0)
        except BaseException:  # noqa: BLE001
            # the reason goes to the log, and nothing of the template may run after it
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return (
        "" if code == 0 else f"a forked process cannot calculate on {device}: it ended with {code}"
    )


def _fork(channel: socket.socket, spec: Path, line: int, log: int) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        channel.close()
        _run_task(spec, line, log)
    os.close(line)
    os.close(log)
    return pid


def _run_task(spec: Path, line: int, log: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        from benchmarks.kernelbench import child

        code = child.main(["--line", str(line), "--spec", str(spec)])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001
        # its traceback is what the log is for, and nothing of the template may run after it
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
