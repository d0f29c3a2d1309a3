"""Processes that are forked rather than started: as confined, as clean, and ended with what forks
them.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.reference.source_reference import read_reference
from torch_cudal1.judge.sandbox.child import Child, make_limits
from torch_cudal1.judge.sandbox.fork_server import ForkServer

CPU = torch.device("cpu")
LIMITS = replace(make_limits(Settings(), CPU), threads=1)
SPY = """
import os, torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x
def get_inputs():
    raise RuntimeError("saw " + open("/proc/self/environ").read() + str(dict(os.environ)) + str(os.getpid()))
def get_init_inputs():
    return []
"""


def read_error(child: Child) -> str:
    with pytest.raises(SandboxError) as error_text:
        read_reference(child, SPY, CPU)
    return str(error_text.value)


def test_a_forked_child_serves_and_holds_no_secret_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_API_KEY", "do-not-tell")
    with ForkServer() as fork_server:
        with Child(LIMITS, Contract(), fork_server=fork_server) as child:
            error_text = read_error(child)
            assert "TMPDIR" in error_text
            assert "do-not-tell" not in error_text
        with (
            Child(LIMITS, Contract(), fork_server=fork_server) as first,
            Child(LIMITS, Contract(), fork_server=fork_server) as second,
        ):
            assert first.pid != second.pid
            os.kill(first.pid, signal.SIGKILL)
            assert second.call("clear")["nonce"]


def test_the_fork_server_asks_nvml_for_gpus_and_its_children_ask_as_usual() -> None:
    with ForkServer() as fork_server:
        assert (
            b"PYTORCH_NVML_BASED_CUDA_CHECK=1"
            in Path(f"/proc/{fork_server.pid}/environ").read_bytes()
        )
        with Child(LIMITS, Contract(), fork_server=fork_server) as child:
            assert "'PYTORCH_NVML" not in read_error(
                child
            )  # in os.environ; /proc has what the forking process was started with


def test_children_end_with_their_fork_server_which_forks_no_more() -> None:
    fork_server = ForkServer()
    child = Child(LIMITS, Contract(), fork_server=fork_server)
    fork_server.close()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child.pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child.pid}").exists()
    child.close()
    with pytest.raises(SandboxError, match="the process that forks children is gone"):
        Child(LIMITS, Contract(), fork_server=fork_server)
