"""Memory of a GPU that this process holds and does not use: PyTorch keeps it for later, while the judge's children need it now."""

from __future__ import annotations

import torch

__all__ = ["give_back"]

_WORTH_BYTES = 1 << 30  # to allocate less than that anew takes longer than it helps


def give_back(device: torch.device) -> None:
    """Let other processes have what this one has freed, where it is much."""
    if device.type == "cuda" and torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > _WORTH_BYTES:
        torch.cuda.empty_cache()
