"""Memory of a GPU that the judge's processes share with each other, and with whoever else is there:
how much one may keep for later use, and giving back what PyTorch keeps without need.
"""

from __future__ import annotations

from functools import cache

import torch

__all__ = [
    "release_cached_memory",
    "is_memory_short",
    "max_cached_bytes",
    "make_room",
    "memory_share_bytes",
]

_CACHED_GPU_FRACTION, _CACHED_HOST_BYTES = 1 / 24, 8 << 30  # of a GPU; on the host
_MIN_RELEASE_BYTES = 1 << 30  # to allocate less than that anew takes longer than it helps
# of a message: in the memory that is shared, in the child, what it computes of it, and what that
# takes meanwhile
_PEAK_COPIES_PER_MESSAGE = 6


def memory_share_bytes(device: str, share: float, host_bytes: int) -> int:
    """Bytes: a share of all memory of the current GPU for "cuda", `host_bytes` for "cpu", which
    many others live on.
    """
    return (
        int(share * _total_bytes())
        if device == "cuda" and torch.cuda.is_available()
        else host_bytes
    )


def max_cached_bytes(device: str) -> int:
    """How much of what was drawn and computed stays for the next candidate; the rest is made anew
    for each.
    """
    return memory_share_bytes(device, _CACHED_GPU_FRACTION, _CACHED_HOST_BYTES)


@cache
def _total_bytes() -> int:
    return torch.cuda.mem_get_info()[1]


def release_cached_memory(device: torch.device) -> None:
    """Let other processes have what this one has freed, where it is much."""
    if (
        device.type == "cuda"
        and torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        > _MIN_RELEASE_BYTES
    ):
        torch.cuda.empty_cache()


def is_memory_short(device: torch.device, size_bytes: int) -> bool:
    """Whether the device has little left for a message of `size_bytes`, a large one, and what
    another process will do with it.
    """
    return (
        device.type == "cuda"
        and size_bytes > _MIN_RELEASE_BYTES
        and torch.cuda.mem_get_info(device)[0] < _PEAK_COPIES_PER_MESSAGE * size_bytes
    )


def make_room(device: torch.device, size_bytes: int) -> None:
    """`release_cached_memory` where memory is short for a message of `size_bytes`."""
    if is_memory_short(device, size_bytes):
        release_cached_memory(device)
