"""Byte patterns of redzones and guard blocks, made from a seed, and the digests of intact ones.

The worker writes the patterns around tensors and answers their digests. The parent computes the
digests of intact patterns from the seeds that it drew, and decides whether they changed.
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

# On either side of a tensor. CUDA-L2 uses 16,384 elements: the same number of bytes for float32.
REDZONE_BYTES = 64 << 10
# Instead of a seed: all bits set, NaN in every floating type.
SOLID = -1
# Free blocks of each size between guard blocks.
GUARD_HOLES = 3
# PyTorch's alignment of GPU blocks; more than any vector load needs.
_STEP_BYTES = 512
# PyTorch's allocator takes larger blocks from another pool.
_SMALL_POOL_BYTES = 1 << 20


def make_pattern(seed: int, size_bytes: int) -> torch.Tensor:
    """A uint8 tensor on the host: random bytes of a seed, or all bits set for a negative seed."""
    if seed < 0:
        return torch.full((size_bytes,), 0xFF, dtype=torch.uint8)
    # On the host, whatever the device: parent and worker must draw equal bytes.
    return torch.randint(
        0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def left_redzone_bytes(seed: int) -> int:
    """Size in bytes of the redzone before a tensor."""
    # The size varies with the secret seed, so a candidate cannot compute where the redzone starts.
    return REDZONE_BYTES + (seed % 16 * _STEP_BYTES if seed >= 0 else 0)


def guard_block_bytes(hole_bytes: int) -> int:
    """Size in bytes of a guard block beside holes of `hole_bytes`."""
    # From the same pool of the allocator as the holes, or they would not be neighbours.
    return 4096 if hole_bytes <= _SMALL_POOL_BYTES else 2 * _SMALL_POOL_BYTES


def redzone_digest(seed: int) -> str:
    """The sha256 of both redzones of a tensor, intact."""
    return _digest(make_pattern(seed, left_redzone_bytes(seed) + REDZONE_BYTES))


def guard_block_digest(seed: int, hole_bytes: int) -> str:
    """The sha256 of one intact guard block beside holes of `hole_bytes`."""
    return _digest(make_pattern(seed, guard_block_bytes(hole_bytes)))


def _digest(pattern: torch.Tensor) -> str:
    return hashlib.sha256(pattern.numpy().tobytes()).hexdigest()
