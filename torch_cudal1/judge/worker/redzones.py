"""Memory between patterns: a tensor inside a larger buffer, free blocks between fences. What the
patterns hold is told as digests.

The parent computes the same digests from the seed (`expected`), so it is the one who knows whether
they changed. A store that lands beyond the bands is not seen here; that is for `guard_pages`.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_cudal1.judge.wire.channel import storage_extent

__all__ = ["BAND_BYTES", "HOLES", "SOLID", "Bands", "Fences", "expected", "expected_fence"]

BAND_BYTES = 64 << 10  # on either side; CUDA-L2 uses 16,384 elements, which is the same for float32
SOLID = -1  # instead of a seed: all bits set, NaN in every floating type
_STEP = 512  # what PyTorch aligns blocks of a GPU to; more than any vector load needs
_SMALL_POOL_BYTES = 1 << 20  # larger blocks of PyTorch's allocator come from another pool
HOLES = 3  # of each size
_SIDES = 2


def _pattern(seed: int, size: int) -> torch.Tensor:
    if seed < 0:
        return torch.full((size,), 0xFF, dtype=torch.uint8)
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def _shift(seed: int) -> int:
    """Bytes by which the left band is longer: where a tensor starts is not known beforehand."""
    return seed % 16 * _STEP if seed >= 0 else 0


def expected(seed: int) -> str:
    """The digest of untouched bands."""
    return hashlib.sha256(
        _pattern(seed, _SIDES * BAND_BYTES + _shift(seed)).numpy().tobytes()
    ).hexdigest()


def expected_fence(seed: int, size: int) -> str:
    """The digest of an untouched fence around holes of `size` bytes."""
    return hashlib.sha256(_pattern(seed, _fence_bytes(size)).numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Bands:
    """`tensor` lies in `buffer` (bytes), `left` bytes from its start."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    left: int

    @classmethod
    def around(cls, tensor: torch.Tensor, seed: int) -> Bands:
        """A copy of `tensor`, strides and all, with a pattern on both sides."""
        size = storage_extent(tensor.shape, tensor.stride()) * tensor.element_size()
        left = BAND_BYTES + _shift(seed)
        buffer = torch.empty(left + size + BAND_BYTES, dtype=torch.uint8, device=tensor.device)
        pattern = _pattern(seed, left + BAND_BYTES).to(tensor.device)
        buffer[:left] = pattern[:left]
        buffer[left + size :] = pattern[left:]
        inner = (
            buffer[left : left + size]
            .view(tensor.dtype)
            .as_strided(tensor.shape, tensor.stride(), left // tensor.element_size())
        )
        if size:
            flat = tensor.detach().as_strided((size // tensor.element_size(),), (1,))
            buffer[left : left + size].copy_(flat.view(torch.uint8))
        return cls(inner.requires_grad_(tensor.requires_grad), buffer, left)

    def digest(self) -> str:
        """Of both bands, as they are now."""
        right = self.buffer.numel() - BAND_BYTES
        both = torch.cat(
            (self.buffer[: self.left], self.buffer[right:])
        ).cpu()  # what lies between may be gigabytes
        return hashlib.sha256(_bytes_of(both)).hexdigest()


@dataclass(frozen=True)
class Fences:
    """Blocks that stand beside free ones of the sizes asked for, so that what a candidate allocates
    next lies between them.
    """

    blocks: tuple[torch.Tensor, ...]

    @classmethod
    def between(cls, sizes: Sequence[int], seed: int, device: torch.device) -> Fences:
        """Holes and fences in turn: PyTorch's allocator cuts blocks off what it has just reserved
        one after the other.
        """
        torch.cuda.empty_cache()
        fences: list[torch.Tensor] = []
        holes: list[torch.Tensor] = []
        for size in sizes:
            pattern = _pattern(seed, _fence_bytes(size)).to(device)
            fences.append(pattern.clone())
            for _ in range(HOLES):
                holes.append(torch.empty(max(size, 1), dtype=torch.uint8, device=device))
                fences.append(pattern.clone())
        return cls(tuple(fences))

    def digests(self) -> list[str]:
        """Of each fence, as it is now."""
        return [hashlib.sha256(_bytes_of(block.cpu())).hexdigest() for block in self.blocks]


def _fence_bytes(size: int) -> int:
    return 4096 if size <= _SMALL_POOL_BYTES else 2 * _SMALL_POOL_BYTES


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""
