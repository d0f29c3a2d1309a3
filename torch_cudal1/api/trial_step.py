"""A training step made for the sake of measuring: nothing of the user's is written to, accumulated
into, or told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["MORE_THAN_NOISE", "copy_of", "gradients"]

# the median speed-up at which another of PyTorch's own ways takes the place of the one that was
# asked for
MORE_THAN_NOISE = 1.02


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same shape, strides and need of a gradient."""
    fresh = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return fresh.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def gradients(results: Any, wanted: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a loss over every differentiable tensor in `results`; they are returned,
    never accumulated.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    losses = [tensor.abs().float().sum() for tensor in tensors if tensor.requires_grad]
    return torch.autograd.grad(torch.stack(losses).sum(), wanted, allow_unused=True)
