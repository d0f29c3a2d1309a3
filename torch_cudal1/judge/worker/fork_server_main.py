"""The fork server: a process that forks children of the judge. Started by
`judge.sandbox.fork_server` as `python -m torch_cudal1.judge.worker.fork_server_main FD MODULE...`.

It imports the modules, and from then on only forks and reaps. It runs no candidate, touches no
device and holds no result.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch_cudal1.core.settings import replace_environment
from torch_cudal1.judge.sandbox.confine import __main__ as launcher
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan
from torch_cudal1.judge.worker import session

__all__ = ["reap"]

MAX_REQUEST_BYTES = 1 << 20


def _serve(channel: socket.socket, imports: Sequence[str]) -> None:
    for module in imports:
        importlib.import_module(module)
    statuses: dict[int, int] = {}
    answer: dict[str, Any]
    while True:
        text, fds, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 2)
        # The judge has closed its end, or died.
        if not text:
            return
        request = json.loads(text)
        if request["verb"] == "fork":
            # In the server: once for all children.
            importlib.import_module(request["worker"])
            pid = os.fork()
            if not pid:
                # The child must not be able to ask the server for processes.
                channel.close()
                _become_child(request, *fds)
            # The child has its own copies; with these open, the judge would see no end of its
            # stream.
            for fd in fds:
                os.close(fd)
            answer = {"pid": pid}
        else:
            reap(statuses)
            answer = {"status": statuses.pop(int(request["pid"]), None), "server": os.getpid()}
        channel.send(json.dumps(answer).encode())


def reap(statuses: dict[int, int]) -> None:
    """Collect the forked processes that have ended: their exit statuses by pid, negative for a
    signal.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        # Kept until the judge asks for it.
        statuses[pid] = os.waitstatus_to_exitcode(status)


def _become_child(request: Mapping[str, Any], channel: int, log: int) -> NoReturn:
    """Turn this fork into a supervisor, and its own fork into the worker.

    Where the launcher would execute a new interpreter, this one goes on.
    """
    # As Popen(start_new_session=True) does for a child that is not forked.
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    plan = LaunchPlan.from_json(request["plan"])
    os.chdir(plan.scratch)
    replace_environment(request["variables"])
    folders = request["variables"].get("PYTHONPATH", "").split(os.pathsep)
    # Appended: what was imported must come from the same folders as in the server.
    sys.path += [folder for folder in folders if folder and folder not in sys.path]
    # An import may have cached the server's folder; the child has its own.
    tempfile.tempdir = None
    # The launcher ends with execv. In a fork the worker runs there instead, in the confinement that
    # the launcher has built.
    execute = os.execv

    def serve_instead(path: str, command: list[str]) -> None:
        # The candidate must find the real function.
        os.execv = execute
        os.close(log)
        sys.argv = command
        try:
            session.main(channel, importlib.import_module(request["worker"]).HANDLERS)
        finally:
            # Never return: the supervisor's code would run in the worker.
            os._exit(1)
        os._exit(0)

    os.execv = serve_instead  # type: ignore[assignment]
    launcher.main(plan, ["worker"])


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
