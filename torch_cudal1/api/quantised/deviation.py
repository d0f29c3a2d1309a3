"""How far a module's outputs are from those of the module that it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Deviation", "measure_deviation"]

# What says of an output that it has logits: the name that transformers gives them.
_LOGITS = "logits"


@dataclass(frozen=True)
class Deviation:
    """`relative_error`: the norm of the difference over the norm of the expected numbers, the largest
    of all outputs. Of logits also the share of equal `agreement` about the likeliest class, and the
    mean `divergence` (Kullback-Leibler, nats) of the distributions; None where there are none.
    """

    relative_error: float
    agreement: float | None = None
    divergence: float | None = None

    def __str__(self) -> str:
        parts = [f"relative error {self.relative_error:.4f}"]
        if self.agreement is not None and self.divergence is not None:
            parts.append(f"agreement {self.agreement:.4f}")
            parts.append(f"divergence {self.divergence:.5f} nats")
        return ", ".join(parts)


def measure_deviation(actual: Any, expected: Any) -> Deviation:
    """The deviation of one call's result from another's of the same form. Raises ValueError for
    results of different forms, or without a floating-point tensor.
    """
    actual_tensors, expected_tensors = _name_tensors(actual), _name_tensors(expected)
    if [(name, t.shape) for name, t in actual_tensors] != [
        (name, t.shape) for name, t in expected_tensors
    ]:
        raise ValueError("the results of both modules differ in form")
    if not expected_tensors:
        raise ValueError("the module yields no floating-point tensor to compare")
    pairs = [
        (name, a.double(), b.double())
        for (name, a), (_, b) in zip(actual_tensors, expected_tensors, strict=True)
    ]
    error = max(_relate(a, b) for _, a, b in pairs)
    logits = _find_logits(expected, pairs)
    if logits is None:
        return Deviation(error)
    a, b = logits
    agreement = (a.argmax(-1) == b.argmax(-1)).double().mean()
    p, q = b.log_softmax(-1), a.log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1).mean()
    return Deviation(error, float(agreement), float(divergence))


def _name_tensors(result: Any) -> list[tuple[str, Tensor]]:
    """Floating-point tensors of a result with their places in it."""
    leaves, _ = pytree.tree_flatten_with_path(result)
    return [
        (pytree.keystr(path), leaf)
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point and leaf.numel()
    ]


def _relate(actual: Tensor, expected: Tensor) -> float:
    # Masks fill with infinities and dtypes' lowest numbers: where both have the same, nothing
    # differs, and those numbers must not make every other difference small.
    differs = actual != expected
    difference = torch.where(differs, actual - expected, 0.0)
    norm = torch.where(expected.isfinite() & (expected.abs() < 1e30), expected, 0.0).norm()
    return float(difference.norm() / norm) if differs.any() else 0.0


def _find_logits(
    result: Any, pairs: list[tuple[str, Tensor, Tensor]]
) -> tuple[Tensor, Tensor] | None:
    """An output of that name; else the one tensor that a classifier yields, (batch, classes)."""
    for name, actual, expected in pairs:
        if _LOGITS in name and expected.dim() > 1:
            return actual, expected
    if isinstance(result, Mapping) or len(pairs) != 1:
        return None
    ((_, actual, expected),) = pairs
    return (actual, expected) if expected.dim() == 2 and expected.shape[1] > 1 else None
