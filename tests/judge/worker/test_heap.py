"""glibc's allocator in a process of its own: what is asked of it stays in there."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FAULTS = """
import ctypes, resource, torch
from torch_cudal1.judge.worker.heap import keep_freed

def faults():
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        batch = [torch.ones(1 << 18) for _ in range(16)]  # 1 MiB each
        told = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        del batch
    return told

ctypes.CDLL(None).mallopt(-3, 1 << 16)  # as a process may be that has freed nothing large: what is freed goes back at once
given_back = faults()
assert keep_freed()
print(given_back, faults())
"""
_FILLED = """
import torch
from torch_cudal1.judge.worker.heap import fill_fresh
with fill_fresh(0xA5) as done:
    assert done, "glibc does not fill"
    assert (torch.empty(1 << 12, dtype=torch.uint8) == 0xA5).all()
"""


def _run(code: str) -> str:
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's switches")
def test_freed_memory_serves_the_next_batch_without_page_faults() -> None:
    returned_faults, kept_faults = map(int, _run(_FAULTS).split())
    assert returned_faults > 8 * max(
        kept_faults, 64
    )  # a page fault for each of 4,096 pages, or for each huge one


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's switches")
def test_fresh_memory_holds_the_byte() -> None:
    _run(_FILLED)
