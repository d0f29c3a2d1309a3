"""The last restrictions that the child lays on itself, when torch is loaded and no byte of a
candidate was read: memory, GPU share, seccomp filter of the run phase.

They come on top of what the launcher did before. PyTorch's share of the GPU binds PyTorch's
allocator only; code that calls the driver allocates what it likes.
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
    """Carry out what the judge's first request says of memory, GPU and phase. Raises OSError when
    the filter cannot be installed.
    """
    if memory := int(request["memory_bytes"]):
        # on top of what is mapped: torch maps gigabytes that it never uses
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory,) * 2)
    if not request["own"]:
        # when memory runs out all the same, this process goes first; some containers forbid it
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    if request["gpu_fraction"] < 1.0:
        # starts CUDA, which may start a helper process: before the filter
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(float(request["gpu_fraction"]), index)
    if request["phase"] == "run":
        seccomp.install_filter(
            seccomp.list_rules("run", own=request["own"], pid=os.getpid()), all_threads=True
        )
