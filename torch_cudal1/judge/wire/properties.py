"""Facts about the outputs of a call that do not depend on their values: their form, and the memory
that they share.

The same function describes the candidate's outputs (in the child) and the reference's (in the
parent). The parent compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["describe"]


def describe(
    outputs: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    held: Sequence[Sequence[torch.Tensor | None]] = (),
) -> list[dict[str, Any] | None]:
    """One JSON object per output: type, dtype, shape, strides, device, whether its storage is large
    enough, and which tensors share its memory.

    Its `inputs` and `outputs` list the positions of tensors whose storage overlaps; its `held` is
    true where an output of an earlier call (`held`), still alive, overlaps.
    """
    earlier = [t for outs in held for t in outs if t is not None]
    return [
        _describe_output(position, out, outputs, inputs, earlier)
        for position, out in enumerate(outputs)
    ]


def _describe_output(
    position: int,
    out: torch.Tensor | None,
    outputs: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    earlier: Sequence[torch.Tensor],
) -> dict[str, Any] | None:
    if out is None:
        return None
    shares = [index for index, tensor in enumerate(inputs) if _overlaps(out, tensor)]
    # An earlier output that is a view of an input is no buffer that the candidate kept.
    held_by_inputs = [
        t
        for t in earlier
        if _overlaps(out, t) and not any(_overlaps(t, tensor) for tensor in inputs)
    ]
    last = out.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(out.shape, out.stride(), strict=True)
    )
    return {
        # Not isinstance: a subclass may compute when it is compared.
        "exact_type": type(out) is torch.Tensor,
        "dtype": str(out.dtype).removeprefix("torch."),
        "shape": list(out.shape),
        "strides": _list_relevant_strides(out),
        "device": out.device.type,
        # A lazy tensor has a storage without bytes.
        "storage": out.numel() == 0
        or (last + 1) * out.element_size() <= out.untyped_storage().nbytes(),
        "inputs": shares,
        "outputs": [
            i
            for i, other in enumerate(outputs)
            if i != position and other is not None and _overlaps(out, other)
        ],
        "held": bool(held_by_inputs),
    }


def _list_relevant_strides(out: torch.Tensor) -> list[int]:
    """Strides, with 0 where they have no meaning: dimensions of size 1, and empty tensors."""
    return [
        stride if size > 1 and out.numel() else 0
        for size, stride in zip(out.shape, out.stride(), strict=True)
    ]


def _overlaps(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.device != right.device:
        return False
    # By address: two storage objects can be made over the same memory.
    a, b = left.untyped_storage(), right.untyped_storage()
    if not a.nbytes() or not b.nbytes():
        return False
    return a.data_ptr() < b.data_ptr() + b.nbytes() and b.data_ptr() < a.data_ptr() + a.nbytes()
