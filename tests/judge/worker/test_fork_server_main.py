"""The fork server answers statuses of what it forked, and ends when the judge hangs up."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
# In a process of its own, as it waits for any child of its process.
REAP = """
import os, signal, time
from torch_cudal1.judge.worker.fork_server_main import reap

def fork(end):
    pid = os.fork()
    if not pid:
        end()
    return pid

statuses = {1: 5}
reap(statuses)
assert statuses == {1: 5}, "without children nothing changes"
expected = {
    fork(lambda: os._exit(3)): 3,
    fork(lambda: os._exit(0)): 0,
    fork(lambda: os.kill(os.getpid(), signal.SIGKILL)): -9,
}
deadline = time.monotonic() + 30
while len(statuses) < 4 and time.monotonic() < deadline:
    reap(statuses)
assert statuses == {1: 5} | expected, statuses
"""


@contextmanager
def start_server(*modules: str) -> Iterator[tuple[socket.socket, subprocess.Popen[str]]]:
    """The judge's end of the channel, and the server that imports these modules."""
    judge, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    judge.settimeout(60)
    command = [
        sys.executable,
        "-m",
        "torch_cudal1.judge.worker.fork_server_main",
        str(channel.fileno()),
        *modules,
    ]
    with (
        judge,
        subprocess.Popen(
            command, pass_fds=[channel.fileno()], stderr=subprocess.PIPE, text=True
        ) as server,
    ):
        channel.close()
        yield judge, server
        judge.close()


def read_all(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.read()


def test_exit_codes_and_signals_of_ended_children_are_collected_by_process_id() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", REAP], capture_output=True, text=True, timeout=120, check=False
    )
    assert completed.returncode == 0, completed.stderr


def test_a_server_answers_and_ends_when_the_judge_hangs_up() -> None:
    with start_server("decimal") as (judge, server):
        judge.send(json.dumps({"verb": "status", "pid": 1}).encode())
        assert json.loads(judge.recv(1 << 16)) == {"status": None, "server": server.pid}
        judge.close()
        assert server.wait(60) == 0


def test_a_server_that_cannot_import_a_module_ends_with_the_reason() -> None:
    with start_server("there_is_no_such_module") as (judge, server):
        assert "there_is_no_such_module" in read_all(server.stderr)
        assert server.wait(60) == 1
        assert judge.recv(1 << 16) == b""
