"""Byte patterns of redzones and guard blocks, made from a seed, and the digests of intact ones.

The worker lays the patterns around tensors and answers digests; the parent computes the digests of
intact patterns from the seeds that it drew, and so is the one that knows whether they changed.
"""

from __future__ import annotations

import hashlib

import torch

__all__ = [
    "GUARD_HOLES",
    "REDZONE_BYTES",
    "SOLID",
    "guard_block_bytes",
    "guard_block_digest",
    "left_redzone_bytes",
    "make_pattern",
    "redzone_digest",
]

# on either side of a tensor; CUDA-L2 uses 16,384 elements, which is the same for float32
REDZONE_BYTES = 64 << 10
SOLID = -1  # instead of a seed: all bits set, NaN in every floating type
GUARD_HOLES = 3  # free blocks of each size between guard blocks
# what PyTorch aligns blocks of a GPU to; more than any vector load needs
_STEP_BYTES = 512
# larger blocks of PyTorch's allocator come from another pool
_SMALL_POOL_BYTES = 1 << 20


def make_pattern(seed: int, size_bytes: int) -> torch.Tensor:
    """Bytes on the host: random ones of a seed, or all bits set for `SOLID` and below."""
    if seed < 0:
        return torch.full((size_bytes,), 0xFF, dtype=torch.uint8)
    return torch.randint(
        0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def left_redzone_bytes(seed: int) -> int:
    """Bytes before a tensor. They vary with the seed: where a tensor starts is not known before."""
    return REDZONE_BYTES + (seed % 16 * _STEP_BYTES if seed >= 0 else 0)


def guard_block_bytes(hole_bytes: int) -> int:
    """Bytes of a guard block beside holes of `hole_bytes`, from the same pool as these."""
    return 4096 if hole_bytes <= _SMALL_POOL_BYTES else 2 * _SMALL_POOL_BYTES


def redzone_digest(seed: int) -> str:
    """The digest of both redzones of a tensor, intact."""
    return _digest(make_pattern(seed, left_redzone_bytes(seed) + REDZONE_BYTES))


def guard_block_digest(seed: int, hole_bytes: int) -> str:
    """The digest of one guard block beside holes of `hole_bytes`, intact."""
    return _digest(make_pattern(seed, guard_block_bytes(hole_bytes)))


def _digest(pattern: torch.Tensor) -> str:
    return hashlib.sha256(pattern.numpy().tobytes()).hexdigest()
