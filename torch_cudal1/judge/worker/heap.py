"""Switches of glibc's allocator: the contents of fresh memory, and whether freed memory is kept.
Other C libraries have no such switches.

They change the whole process, so they are for children only, never for a user's process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["fill_fresh", "keep_freed"]

# M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_PERTURB of malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _PERTURB = -1, -3, -6
# The largest M_MMAP_THRESHOLD that glibc accepts on 64-bit systems.
_MOST_FROM_HEAP = 32 << 20


@contextmanager
def fill_fresh(byte: int) -> Iterator[bool]:
    """While the body runs, malloc fills fresh memory with `byte`, and free fills freed memory with
    its complement. Yields whether fresh memory really holds the byte.
    """
    # malloc fills with the complement of M_PERTURB (mallopt(3)).
    if not _set(_PERTURB, byte ^ 0xFF):
        yield False
        return
    try:
        sample = torch.empty(1 << 16, dtype=torch.uint8)
        yield bool((sample == byte).all())
    finally:
        _set(_PERTURB, 0)


def keep_freed() -> bool:
    """From now on keep freed memory, of up to 32 MiB a block, in the process: the next call uses it
    without page faults. False where the C library has no such switch.
    """
    # Without it glibc adapts its thresholds to earlier frees: two processes with the same code
    # differed by a quarter for results of 1 MiB (240 us a call, of which 100 us computing).
    return _set(_MMAP_THRESHOLD, _MOST_FROM_HEAP) and _set(_TRIM_THRESHOLD, 1 << 30)


def _set(parameter: int, value: int) -> bool:
    libc = ctypes.CDLL(None)
    return hasattr(libc, "mallopt") and bool(libc.mallopt(parameter, value))
