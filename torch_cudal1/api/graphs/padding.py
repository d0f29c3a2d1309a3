"""Encoders that take a batch apart by its padding: in inference `nn.TransformerEncoder` computes with
nested tensors where it gets a mask of padding, and answers zeros at padded places. Dynamo traces the
way without them, whose answers there are others; in a call without padding both are equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ZERO_PADDING", "PaddingWatch", "makes_nested_tensors"]

ZERO_PADDING = (
    "nn.TransformerEncoder with a mask of padding answers zeros at padded places in inference, and "
    "its operators, as Dynamo traces them, do not"
)


def makes_nested_tensors(module: Any) -> bool:
    """Whether a part of the module may do so."""
    parts = module.modules() if isinstance(module, torch.nn.Module) else ()
    return any(
        isinstance(part, torch.nn.TransformerEncoder) and part.use_nested_tensor for part in parts
    )


class PaddingWatch(TorchDispatchMode):
    """Within its block, notes whether a mask of padding is looked at for that."""

    def __init__(self) -> None:
        super().__init__()
        self.has_mask = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.has_mask |= "_nested_tensor_from_mask" in str(func)
        return func(*args, **(kwargs or {}))
