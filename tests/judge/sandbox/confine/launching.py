"""Runs Python code under the launcher, for tests of what confines it."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

import torch_cudal1
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan
from torch_cudal1.judge.sandbox.start import end_process, launch_process

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def make_variables() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(torch_cudal1.__file__).parents[1]), "PATH": "/usr/bin:/bin"}


def run_confined(
    scratch: Path, code: str, plan: LaunchPlan | None = None, *, stop_after_s: float = 0.0
) -> tuple[int, bytes, float]:
    """Exit code, output and seconds of Python code under the launcher; told to stop after a while
    if that is not 0.
    """
    with tempfile.TemporaryFile() as log:
        started_s = time.monotonic()
        process = launch_process(
            plan or LaunchPlan(os.getpid(), str(scratch)),
            [sys.executable, "-S", "-c", code],
            make_variables(),
            fds=(),
            log=log,
        )
        if stop_after_s:
            time.sleep(stop_after_s)
            end_process(process)
        exit_code = process.wait(60)
        log.seek(0)
        return exit_code, log.read(), time.monotonic() - started_s


HOLD = """
import fcntl, os, signal, time
def hold():
    lock = os.open("lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    open("ready", "w").close()
    time.sleep(600)
"""


def is_free(lock: Path) -> bool:
    import fcntl

    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
