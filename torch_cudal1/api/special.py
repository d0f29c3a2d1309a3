"""Functions that PyTorch lacks: logarithms of the modified Bessel functions of any order, where
they themselves overflow.

They are not part of the package's star import: call `torch_cudal1.log_bessel_i` (or `cudal1.`).

They work on every device, under `torch.compile` and with gradients in x; in an accelerated module
on a GPU they become part of the kernels around them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_cudal1.ir.ops.bessel import TARGETS, operator_of

__all__ = ["log_bessel_i", "log_bessel_k"]


def log_bessel_i(order: Tensor | float, x: Tensor) -> Tensor:
    """log I_v(x), the modified Bessel function of the first kind, for real orders v >= 0 and x >=
    0, broadcast.

    NaN where one of them is negative; numbers beyond 1e300 may overflow.

    Computed in float64 and rounded to the type that `order + x` has. `order` takes no gradient:
    NotImplementedError. Raises TypeError where neither is floating-point.
    """
    return _call_operator("log_bessel_i", order, x)


def log_bessel_k(order: Tensor | float, x: Tensor) -> Tensor:
    """log K_v(x), the modified Bessel function of the second kind, for any real order and x >= 0;
    otherwise as `log_bessel_i`.
    """
    return _call_operator("log_bessel_k", order, x)


def _call_operator(name: str, order: Tensor | float, x: Tensor) -> Tensor:
    if not isinstance(order, Tensor):
        # A 0-dim tensor does not promote the dtype of x, as a Python number would not.
        order = torch.full(
            (), float(order), dtype=x.dtype if x.is_floating_point() else None, device=x.device
        )
    result: Tensor = getattr(torch.ops.cudal1, name)(order, x)
    return result


for _target in TARGETS:
    # Dynamo looks an operator up by its name while it traces, so all of them are defined now.
    operator_of(_target)
