"""Which input sets a child holds, and which of them are evicted when they take too many bytes: the
least recently used.

Sets of a few kilobytes all stay. A set of gigabytes is held twice, here and in the child, and a
candidate runs on dozens: a set that was evicted is sent again when it is needed. This module only
counts; it talks to no process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch

from torch_cudal1.device.gpu_memory import memory_share_bytes

__all__ = ["InputCache", "count_tensor_bytes"]

# Beside what the candidate itself needs. A set of gigabytes is held here and in the child.
_GPU_SHARE, _HOST_BYTES = 1 / 16, 4 << 30  # of a GPU's memory; on the host


@dataclass
class InputCache:
    """Sets of one child by name, the most recently used last. `bases`: whose memory a set shares,
    for all sets that were ever sent.
    """

    device: str
    sizes: dict[str, int] = field(default_factory=dict)
    bases: dict[str, str] = field(default_factory=dict)

    def admit(self, name: str, size_bytes: int, base: str, pinned: Collection[str]) -> list[str]:
        """Record a set that is about to be sent. Returns the names of the sets to evict first, none
        of them in `pinned`.
        """
        evicted, room = [], memory_share_bytes(self.device, _GPU_SHARE, _HOST_BYTES)
        # Dictionaries keep their order, so the sets that were not used for longest come first. The
        # base's memory is the new set's too.
        for other in [
            name_held
            for name_held in self.sizes
            if name_held != name and name_held != base and name_held not in pinned
        ]:
            if sum(self.sizes.values()) + size_bytes <= room:
                break
            del self.sizes[other]
            evicted.append(other)
        # Back in, at the end: just used.
        self.sizes.pop(name, None)
        self.sizes[name], self.bases[name] = size_bytes, base
        return evicted

    def mark_used(self, name: str) -> bool:
        """Whether the child holds the set; if so, it becomes the most recently used one."""
        if name not in self.sizes:
            return False
        # Back in, at the end: just used.
        self.sizes[name] = self.sizes.pop(name)
        return True

    def forget(self, name: str) -> None:
        """Record that the set was dropped."""
        self.sizes.pop(name, None)
        self.bases.pop(name, None)


def count_tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the elements of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
