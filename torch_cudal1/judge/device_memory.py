"""Memory of a GPU that the judge's processes share with each other, and with whoever else is there: how much one may keep for later
use, and giving back what PyTorch keeps without need.
"""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["give_back", "kept_bytes", "part_of"]

_KEPT_SHARE, _KEPT_BYTES = 1 / 24, 8 << 30  # of a GPU; on the host
_WORTH_BYTES = 1 << 30  # to allocate less than that anew takes longer than it helps


def part_of(device: str, share: float, host_bytes: int) -> int:
    """Bytes: a share of all memory of the current GPU for "cuda", `host_bytes` for "cpu", which many others live on."""
    return int(share * _total_bytes()) if device == "cuda" and torch.cuda.is_available() else host_bytes


def kept_bytes(device: str) -> int:
    """How much of what was drawn and computed stays for the next candidate; the rest is made anew for each."""
    return part_of(device, _KEPT_SHARE, _KEPT_BYTES)


@cache
def _total_bytes() -> int:
    return torch.cuda.mem_get_info()[1]


def give_back(device: torch.device) -> None:
    """Let other processes have what this one has freed, where it is much."""
    if device.type == "cuda" and torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > _WORTH_BYTES:
        torch.cuda.empty_cache()
