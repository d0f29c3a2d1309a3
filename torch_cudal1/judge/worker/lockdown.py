"""The last restrictions of a child, set after torch is loaded and before any byte of a candidate is
read: memory limit, GPU share, seccomp filter of the run phase.

They add to those of the launcher. The GPU share binds PyTorch's allocator only; code that calls the
driver can allocate more.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.judge.sandbox.confine import seccomp

__all__ = ["lock_down"]


def lock_down(request: Mapping[str, Any], device: torch.device) -> None:
    """Apply the memory limit, GPU share and phase of the judge's first request. Raises OSError when
    the filter cannot be installed.
    """
    if memory := int(request["memory_bytes"]):
        # Added to what is mapped now: torch maps gigabytes that it never uses.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory,) * 2)
    if not request["own"]:
        # If memory runs out all the same, this process is killed first. Some containers forbid it.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    if request["gpu_fraction"] < 1.0:
        # Before the filter: this initialises CUDA, which may start a helper process.
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(float(request["gpu_fraction"]), index)
    if request["phase"] == "run":
        seccomp.install_filter(
            # All threads: torch has started some, and a filter of one thread does not bind the
            # others.
            seccomp.list_rules("run", own=request["own"], pid=os.getpid()),
            all_threads=True,
        )
