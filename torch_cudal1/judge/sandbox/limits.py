"""`Limits` of one child: device, time, memory, files, and how far its code is trusted. Values only;
`start` and `worker.lockdown` apply them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from torch_cudal1.core.settings import Settings
from torch_cudal1.judge.sandbox.confine.seccomp import Phase

__all__ = ["Limits", "Phase", "Trust", "make_limits", "read_available_bytes", "read_free_bytes"]

Trust = Literal["own", "foreign"]
_FOREIGN_FILE_BYTES = 16 << 30
_FOREIGN_GPU_FRACTION = 0.9
# Of the available memory, where the settings name no limit.
_FOREIGN_MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class Limits:
    """The limits of one child.

    - deadline_s: seconds per request.
    - memory_bytes: address space beyond what the process has after its start; 0: no limit.
    - threads: of PyTorch's CPU operators. file_bytes: size of one file.
    - visible_gpu: False for a child that only compiles.
    - gpu_fraction: share of GPU memory that PyTorch's allocator may take; code that calls the
      driver is not bound by it.
    - trust: "own" for this package's rewrites and templates, and Programs of the user's cache or of
      a trusted signer; "foreign" for all other code.
    - phase: "build": the child may start compilers. "run": it may start only threads.
    - unsafe: foreign code may run below level 2.
    - has_compile_pool: Inductor may start processes that compile. False for a process that is timed
      in turn with another.
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
    has_compile_pool: bool = True

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
    has_compile_pool: bool = True,
) -> Limits:
    """The limits that follow from the settings. Foreign code never has a compile pool."""
    own = trust == "own"
    memory = int(settings.memory_limit_gib * 2**30)
    if not memory and not own:
        # Without a limit, one candidate could have other programs of the machine killed.
        memory = int(read_available_bytes() * _FOREIGN_MEMORY_SHARE)
    return Limits(
        device,
        settings.candidate_timeout_s,
        # CUDA reserves more address space than there is memory, so a limit would break it.
        memory if device.type == "cpu" else 0,
        torch.get_num_threads(),
        visible_gpu,
        Limits.file_bytes if own else _FOREIGN_FILE_BYTES,
        trust,
        phase,
        settings.unsafe_sandbox,
        1.0 if own else _FOREIGN_GPU_FRACTION,
        own and has_compile_pool,
    )


def read_free_bytes(device: torch.device) -> int:
    """Bytes that a device has free; 0 where the system does not tell."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_available_bytes()


def read_available_bytes() -> int:
    """Bytes of memory that new processes can get without swapping, from /proc/meminfo; 0 where that
    file cannot be read.
    """
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 0
