"""A training step for the sake of measuring: nothing of the user's is written to or accumulated into,
and no hook of the user's runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["MIN_SPEEDUP_BEYOND_NOISE", "compute_gradients", "copy_leaf"]

# The median speed-up at which another of PyTorch's own ways (eager, torch.compile, a CUDA graph)
# replaces the one that the user asked for.
MIN_SPEEDUP_BEYOND_NOISE = 1.02


def copy_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same shape, strides and need of a gradient."""
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def compute_gradients(
    results: Any, leaves: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a loss over every differentiable tensor in `results`; they are returned,
    never accumulated.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    losses = [tensor.abs().float().sum() for tensor in tensors if tensor.requires_grad]
    return torch.autograd.grad(torch.stack(losses).sum(), leaves, allow_unused=True)
