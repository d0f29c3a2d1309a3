"""Compares tensors by their bits, and casts them to float64, on both sides of the wire.

No tolerance is in this file, as the worker imports it; `judge.reference.compare` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_cudal1.judge.wire.channel import storage_extent

__all__ = ["all_same_bits", "same_bits", "same_storage", "to_float64"]

# Bound at import, before any candidate is loaded: a candidate may patch torch.
_equal = torch.equal


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Whether shape, dtype and the bytes of all elements are equal, NaN payloads included."""
    if left is None or right is None:
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    # As bytes: NaN differs from itself, and 0.0 equals -0.0.
    return _equal(_view_elements_as_bytes(left), _view_elements_as_bytes(right))


def all_same_bits(
    left: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None]
) -> bool:
    """`same_bits` of every output of two calls."""
    return all(same_bits(a, b) for a, b in zip(left, right, strict=True))


def same_storage(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the memory spans of two tensors are equal, including elements that strides skip."""
    return _equal(_view_span_as_bytes(left).to(right.device), _view_span_as_bytes(right))


def to_float64(tensor: Any) -> Any:
    """A floating tensor as float64, a complex one as complex128; anything else as it is."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.dtype.is_floating_point else tensor


def _view_elements_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A tensor of one element is contiguous with any stride, but cannot be viewed as bytes then.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _view_span_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    extent = storage_extent(tensor.shape, tensor.stride())
    return tensor.as_strided((extent,), (1,)).view(torch.uint8)
