"""What the child does to itself last, when torch is loaded and no byte of a candidate was read:
memory, GPU share, the run phase.

It comes on top of what the launcher did before. PyTorch's share of the GPU binds PyTorch's
allocator only; code that calls the driver takes what it wants.
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

__all__ = ["tighten"]


def tighten(request: Mapping[str, Any], device: torch.device) -> None:
    """Carry out what the judge's first request says of memory, GPU and phase. Raises OSError when
    the filter cannot be laid.
    """
    if memory := int(request["memory_bytes"]):
        mapped = (
            int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        )  # torch maps gigabytes it never uses
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory,) * 2)
    if not request["own"]:
        with contextlib.suppress(OSError):  # some containers forbid it
            Path("/proc/self/oom_score_adj").write_text(
                "1000"
            )  # when memory runs out all the same, this goes first
    if request["gpu_fraction"] < 1.0:
        index = (
            torch.cuda.current_device() if device.index is None else device.index
        )  # starts CUDA, which may start a helper
        torch.cuda.set_per_process_memory_fraction(float(request["gpu_fraction"]), index)
    if request["phase"] == "run":
        seccomp.install(seccomp.rules("run", own=request["own"], pid=os.getpid()), all_threads=True)
