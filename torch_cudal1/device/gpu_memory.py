"""Memory of a GPU that several processes share: how much one process may cache, and when it returns
memory that PyTorch's allocator caches.
"""

from __future__ import annotations

from functools import cache

import torch

__all__ = [
    "is_memory_short",
    "make_room",
    "max_cached_bytes",
    "memory_share_bytes",
    "release_cached_memory",
]

# With the results of every input set kept, a call of 1 GiB had a process peak at 25 GiB, and eight
# processes filled a GPU (benchmarks/LOG.md). A share of the GPU, because one size does not fit both
# an H200 and a small card.
_CACHED_GPU_FRACTION, _CACHED_HOST_BYTES = 1 / 24, 8 << 30
# Releasing less helps little, and allocating it again takes time.
_MIN_RELEASE_BYTES = 1 << 30
# What one message costs at its peak, in copies of it: in shared memory, in the child, the results
# that the child computes from it, and their intermediate values.
_PEAK_COPIES_PER_MESSAGE = 6


def memory_share_bytes(device: str, share: float, host_bytes: int) -> int:
    """Bytes that one process may use: a share of all memory of the current GPU for "cuda", and
    `host_bytes` for "cpu", whose memory all other programs use too.
    """
    return (
        int(share * _read_total_bytes())
        if device == "cuda" and torch.cuda.is_available()
        else host_bytes
    )


def max_cached_bytes(device: str) -> int:
    """Bytes of inputs and references that a process keeps for the next candidate. The rest is
    computed again for each candidate.
    """
    return memory_share_bytes(device, _CACHED_GPU_FRACTION, _CACHED_HOST_BYTES)


@cache
def _read_total_bytes() -> int:
    return torch.cuda.mem_get_info()[1]


def release_cached_memory(device: torch.device) -> None:
    """Return memory that PyTorch caches to the driver, where it is more than a GiB."""
    if (
        device.type == "cuda"
        and torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        > _MIN_RELEASE_BYTES
    ):
        torch.cuda.empty_cache()


def is_memory_short(device: torch.device, size_bytes: int) -> bool:
    """Whether the device has little memory left for a large message of `size_bytes` and for the
    results that another process computes from it.
    """
    return (
        device.type == "cuda"
        and size_bytes > _MIN_RELEASE_BYTES
        and torch.cuda.mem_get_info(device)[0] < _PEAK_COPIES_PER_MESSAGE * size_bytes
    )


def make_room(device: torch.device, size_bytes: int) -> None:
    """Call `release_cached_memory` where memory is short for a message of `size_bytes`."""
    if is_memory_short(device, size_bytes):
        release_cached_memory(device)
