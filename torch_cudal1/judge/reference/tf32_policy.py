"""What eager would yield if it made use of its rights: where TF32 is allowed, operands rounded to
TF32 before they are multiplied.

cuDNN uses that right for most convolutions and leaves it for some, by shape, layout and version.
The contract grants the candidate the same rights, also where cuDNN leaves them unused: these are
the results that such a candidate is compared with. It judges nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Tf32OperandRounding", "to_tf32", "uses_tf32"]

# operator -> op class, positions of the operands that are multiplied
_OPERANDS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "convolution": ("conv", (0, 1)),
    "_convolution": ("conv", (0, 1)),
    "mm": ("matmul", (0, 1)),
    "bmm": ("matmul", (0, 1)),
    "linear": ("matmul", (0, 1)),
    "addmm": ("matmul", (1, 2)),
    "_addmm_activation": ("matmul", (1, 2)),
    "baddbmm": ("matmul", (1, 2)),
    "addbmm": ("matmul", (1, 2)),
}


class Tf32OperandRounding(TorchDispatchMode):
    """While it is entered, operators of the classes in `rights` ("matmul", "conv") get float32
    operands rounded to TF32.
    """

    def __init__(self, rights: Collection[str]) -> None:
        super().__init__()
        self._rights = frozenset(rights)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, arguments = func.overloadpacket.__name__, list(args)
        if uses_tf32(name, self._rights):
            # The operator still multiplies in float32: products of TF32 numbers are exact there, as
            # in tensor cores.
            for position in _OPERANDS[name][1]:
                arguments[position] = to_tf32(arguments[position])
        return func(*arguments, **(kwargs or {}))


def uses_tf32(name: str, rights: Collection[str]) -> bool:
    """Whether an ATen operator ("convolution") is of a class with the right to TF32."""
    return name in _OPERANDS and _OPERANDS[name][0] in rights


def to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """To the nearest of TF32's numbers, halves away from zero, as `cvt.rna.tf32.f32` does; other
    dtypes as they are.
    """
    if tensor.dtype != torch.float32:
        return tensor
    # TF32 drops 13 bits of a float32: half of their unit is added, then they are cleared.
    nearest = ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    # The bits of infinity and NaN would carry into others.
    return torch.where(tensor.isfinite(), nearest, tensor)
