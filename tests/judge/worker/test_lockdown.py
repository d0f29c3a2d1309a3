"""The last restrictions of a child hold in its process: memory, and the filter of the run phase."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torch_cudal1.judge.sandbox.confine import seccomp

LOCK_DOWN = """
import os, torch
from torch_cudal1.judge.worker.lockdown import lock_down
lock_down({request!r}, torch.device("cpu"))
{act}
"""
OWN = {"memory_bytes": 0, "own": True, "gpu_fraction": 1.0, "phase": "build"}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def run_locked_down(act: str, **changes: object) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own after `lock_down`."""
    code = LOCK_DOWN.format(request=OWN | changes, act=act)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_memory_beyond_the_limit_is_refused_and_memory_within_it_is_not() -> None:
    within = run_locked_down("bytearray(64 << 20)", memory_bytes=256 << 20)
    assert within.returncode == 0, within.stderr
    beyond = run_locked_down("bytearray(512 << 20)", memory_bytes=256 << 20)
    assert "MemoryError" in beyond.stderr


def test_own_code_without_a_limit_allocates_and_forks() -> None:
    completed = run_locked_down("bytearray(1 << 30); os.fork() or os._exit(0)")
    assert completed.returncode == 0, completed.stderr


def test_foreign_code_is_killed_first_where_memory_runs_out() -> None:
    read = "print(open('/proc/self/oom_score_adj').read().strip())"
    before = run_locked_down(read).stdout.strip()
    assert run_locked_down(read, own=False).stdout.strip() in ("1000", before)


@pytest.mark.skipif(not seccomp.is_supported(), reason="no filter of system calls here")
def test_in_the_run_phase_foreign_code_starts_no_process() -> None:
    allowed = run_locked_down("os.fork() or os._exit(0)", own=False)
    assert allowed.returncode == 0, allowed.stderr
    refused = run_locked_down("os.fork()", own=False, phase="run")
    assert "PermissionError" in refused.stderr
