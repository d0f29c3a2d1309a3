"""Places tensors between redzones, and free GPU memory between guard blocks; digests of both.

The parent computes the digests of intact patterns from the seed (`wire.redzone_patterns`), and
decides whether they changed. A store beyond the redzones goes unnoticed here; `guard_pages` catches
such stores.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_cudal1.judge.wire.channel import storage_extent
from torch_cudal1.judge.wire.redzone_patterns import (
    GUARD_HOLES,
    REDZONE_BYTES,
    guard_block_bytes,
    left_redzone_bytes,
    make_pattern,
)

__all__ = ["GuardBlocks", "Redzones"]


@dataclass(frozen=True)
class Redzones:
    """`tensor` lies in `buffer` (uint8), `left_bytes` from its start, between two patterns."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    left_bytes: int

    @classmethod
    def around(cls, tensor: torch.Tensor, seed: int) -> Redzones:
        """A copy of `tensor`, with its strides, between two patterns made from `seed`."""
        size = storage_extent(tensor.shape, tensor.stride()) * tensor.element_size()
        start = left_redzone_bytes(seed)
        buffer = torch.empty(start + size + REDZONE_BYTES, dtype=torch.uint8, device=tensor.device)
        # One pattern for both sides, so that its digest is that of `redzone_digest`.
        pattern = make_pattern(seed, start + REDZONE_BYTES).to(tensor.device)
        buffer[:start] = pattern[:start]
        buffer[start + size :] = pattern[start:]
        inner = (
            buffer[start : start + size]
            .view(tensor.dtype)
            .as_strided(tensor.shape, tensor.stride(), start // tensor.element_size())
        )
        # Copied as bytes of the whole span: elements that strides skip must stay as they were too.
        if size:
            flat = tensor.detach().as_strided((size // tensor.element_size(),), (1,))
            buffer[start : start + size].copy_(flat.view(torch.uint8))
        return cls(inner.requires_grad_(tensor.requires_grad), buffer, start)

    def digest(self) -> str:
        """The sha256 of both redzones, as they are now."""
        right_start = self.buffer.numel() - REDZONE_BYTES
        # Joined on the device: the tensor between them may have gigabytes.
        both = torch.cat((self.buffer[: self.left_bytes], self.buffer[right_start:])).cpu()
        return hashlib.sha256(_read_bytes(both)).hexdigest()


@dataclass(frozen=True)
class GuardBlocks:
    """GPU blocks with patterns, beside free blocks from which a candidate's next tensors come."""

    blocks: tuple[torch.Tensor, ...]

    @classmethod
    def between(cls, hole_sizes: Sequence[int], seed: int, device: torch.device) -> GuardBlocks:
        """Guard blocks with free holes of `hole_sizes` bytes between them."""
        # On an empty cache PyTorch's allocator reserves a new segment, and cuts blocks off it one
        # after the other: so these blocks are neighbours.
        torch.cuda.empty_cache()
        blocks: list[torch.Tensor] = []
        holes: list[torch.Tensor] = []
        for hole_bytes in hole_sizes:
            pattern = make_pattern(seed, guard_block_bytes(hole_bytes)).to(device)
            blocks.append(pattern.clone())
            for _ in range(GUARD_HOLES):
                holes.append(torch.empty(max(hole_bytes, 1), dtype=torch.uint8, device=device))
                blocks.append(pattern.clone())
        # The holes are freed here, as `holes` goes out of scope; the guard blocks stay.
        return cls(tuple(blocks))

    def digests(self) -> list[str]:
        """The sha256 of each guard block, as it is now."""
        return [hashlib.sha256(_read_bytes(block.cpu())).hexdigest() for block in self.blocks]


def _read_bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""
