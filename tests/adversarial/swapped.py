"""Modules with a planted swap, for cases in runtime form. The planted Program adds 1, so that one sees who answered.

It plants what a search would have found; nothing is searched or judged here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_cudal1
from tests.entries import add_one_to_output, plant, same

__all__ = ["Layer", "is_answered_by_swap", "own", "swap_module"]


class Layer(nn.Module):
    """relu(x @ w.T + b)."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


@contextmanager
def swap_module(
    x: torch.Tensor, *, visible: bool = True, module: nn.Module | None = None
) -> Iterator[Any]:
    """An accelerated module whose swap is bound for `x` without gradients. `visible`: the swap adds 1 to the right result."""
    accelerated = module or Layer(x.shape[-1])
    with tempfile.TemporaryDirectory() as folder:
        with torch.no_grad():
            plant(accelerated, x, Path(folder), change=add_one_to_output if visible else same)
            torch_cudal1.accelerate(accelerated, x, cache_dir=Path(folder), strictness="error")
        try:
            yield accelerated
        finally:
            torch_cudal1.restore(accelerated)


def own(module: nn.Module, *args: Any) -> Any:
    """What the module computes by itself."""
    call: Callable[..., Any] = module._call_impl
    return call(*args)


def is_answered_by_swap(module: nn.Module, *args: Any) -> bool:
    """Whether the visible swap answers this call: its result is the module's plus 1. Asserts that it is one of the two."""
    result, expected = module(*args), own(module, *args)
    by_swap = torch.allclose(result, expected + 1)
    assert by_swap or torch.equal(result, expected), "neither the swap's result nor the module's"
    return by_swap
