"""Calls a module under the transforms of `torch.func`: forward-mode derivatives and `vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["call_transformed"]


def call_transformed(
    transform: str,
    call: Callable[[Sequence[torch.Tensor]], object],
    inputs: Sequence[torch.Tensor],
    seed: int,
) -> object:
    """The result of `call` under "jvp", with the derivatives along a direction that the seed draws;
    or under "vmap", over two calls of which the floating inputs of the second are 3/4 as large.
    """
    floating = [index for index, tensor in enumerate(inputs) if tensor.dtype.is_floating_point]

    def call_with(*values: torch.Tensor) -> object:
        arguments = list(inputs)
        for index, value in zip(floating, values, strict=True):
            arguments[index] = value
        return call(arguments)

    primals = tuple(inputs[index] for index in floating)
    if transform == "jvp":
        return torch.func.jvp(call_with, primals, _draw_tangents(primals, seed))
    stacked = tuple(torch.stack([tensor, 0.75 * tensor]) for tensor in primals)
    mapped: Any = torch.func.vmap(call_with)
    return mapped(*stacked)


def _draw_tangents(primals: Sequence[torch.Tensor], seed: int) -> tuple[torch.Tensor, ...]:
    # On a CPU and in float32, so that all devices and dtypes have the same direction.
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
        for tensor in primals
    )
