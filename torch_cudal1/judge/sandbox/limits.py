"""What one child gets: device, time, memory, files, and how far its code is trusted. Values only;
`start` carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from torch_cudal1.core.settings import Settings
from torch_cudal1.judge.sandbox.confine.seccomp import Phase

__all__ = ["Limits", "Phase", "Trust", "make_limits", "read_available_bytes"]

Trust = Literal["own", "foreign"]
_FOREIGN_FILE_BYTES = 16 << 30
_FOREIGN_GPU_FRACTION = 0.9
_FOREIGN_MEMORY_SHARE = 0.8  # of what is available, when the settings name no limit


@dataclass(frozen=True)
class Limits:
    """What one child gets.

    - deadline_s: per request. memory_bytes: address space beyond what starting takes; 0: no limit.
      file_bytes: of one file.
    - visible_gpu: a child that only compiles is shown none. gpu_fraction: what PyTorch may allocate
      of the GPU; code that calls the driver itself is not held to it.
    - trust: "own" for code of ours (rewrites, templates, Programs of the user's cache), "foreign"
      for what anybody else wrote, also for a Program that nobody vouches for.
    - phase: "build" lets it start compilers; "run" lets it start nothing but threads.
    - unsafe: foreign code may run below level 2.
    """

    device: torch.device
    deadline_s: float
    memory_bytes: int = 0
    threads: int = 1
    visible_gpu: bool = True
    file_bytes: int = 64 << 30
    trust: Trust = "own"
    phase: Phase = "build"
    unsafe: bool = False
    gpu_fraction: float = 1.0

    @property
    def gpu(self) -> bool:
        """Whether the child works on a GPU."""
        return self.visible_gpu and self.device.type == "cuda"


def make_limits(
    settings: Settings,
    device: torch.device,
    *,
    visible_gpu: bool = True,
    trust: Trust = "own",
    phase: Phase = "build",
) -> Limits:
    """The limits that follow from the settings. An address-space limit breaks CUDA's reservations,
    so only CPU children get one.
    """
    own = trust == "own"
    memory = int(settings.memory_limit_gib * 2**30)
    if not memory and not own:
        memory = int(read_available_bytes() * _FOREIGN_MEMORY_SHARE)
    return Limits(
        device,
        settings.candidate_timeout_s,
        memory if device.type == "cpu" else 0,
        torch.get_num_threads(),
        visible_gpu,
        Limits.file_bytes if own else _FOREIGN_FILE_BYTES,
        trust,
        phase,
        settings.unsafe_sandbox,
        1.0 if own else _FOREIGN_GPU_FRACTION,
    )


def read_available_bytes() -> int:
    """Memory that new processes can have without swapping, from /proc/meminfo; 0 where there is
    none to read.
    """
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 0
