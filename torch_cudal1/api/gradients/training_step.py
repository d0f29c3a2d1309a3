"""A training step for the sake of measuring: nothing of the user's is written to or accumulated into,
and no hook of the user's runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["MIN_SPEEDUP_BEYOND_NOISE", "compute_gradients", "copy_leaf"]

# The median speed-up at which another of PyTorch's own ways (eager, torch.compile, a CUDA graph)
# replaces the one that the user asked for. Without it a training step was moved for 1.01x
# [0.99, 1.06], and a later benchmark said 0.945x (H200, 2026-11-23).
MIN_SPEEDUP_BEYOND_NOISE = 1.02


def copy_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same shape, strides and need of a gradient."""
    # `clone` may choose other strides, and a kernel's speed depends on them.
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
    # Summed in float32: a half sum of many elements overflows to inf.
    losses = [tensor.abs().float().sum() for tensor in tensors if tensor.requires_grad]
    # `autograd.grad`, not `backward`: the user's `.grad` must not change. A parameter that the call
    # does not use has no gradient, hence `allow_unused`.
    with _hide_hooks(leaves):
        return torch.autograd.grad(torch.stack(losses).sum(), leaves, allow_unused=True)


@contextmanager
def _hide_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within the block no hook that `register_hook` has put on these tensors runs: it may count or
    log, and would see gradients of no step of the user's.
    """
    # Autograd reads this very dict when it comes to the tensor.
    hook_dicts = [leaf._backward_hooks for leaf in leaves if leaf._backward_hooks]
    hidden = [dict(hooks) for hooks in hook_dicts]
    for hooks in hook_dicts:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, saved in zip(hook_dicts, hidden, strict=True):
            hooks.update(saved)
