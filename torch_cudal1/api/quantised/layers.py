"""Linear layers of fewer bits. Each is an `nn.Linear` for whoever asks, and computes in plain
operators of PyTorch, so that eager, torch.compile and the kernels of this package all run it.

Weights are (out, in), as `nn.Linear` has them; `weight` makes them numbers of the old dtype again, for
models that look at it. What is stored, `digits`, is of integers, which `module.to(dtype)` leaves
alone. Scales are per row of the weight, or for 4 bits per group of a row; inputs of `Fp8Linear` get
a scale per row at each call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Fp8Linear", "Int4Linear", "Int8Linear", "QuantisedLinear", "choose_group"]

_INT8_MAX = 127.0
# Four bits hold 0 to 15; 8 stands for zero.
_INT4_ZERO, _INT4_MAX = 8, 7.0
# Of a row of a weight of 4 bits: elements that share a scale. The first that divides the row is
# taken.
_INT4_GROUPS = (128, 64, 32)
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
# What tensor cores multiply in e4m3: rows of both operands in pieces of 16 bytes.
_FP8_STEP = 16


class QuantisedLinear(nn.Linear):
    """A linear layer made of another one."""

    digits: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        # Not nn.Linear's own: it would allocate and draw weights of full precision.
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # The very parameter: a bias has no fewer bits.
        self.bias = linear.bias
        self.training = linear.training
        self.weight_dtype = linear.weight.dtype

    @classmethod
    def find_obstacle(cls, linear: nn.Linear) -> str:
        """Why the layer cannot be of this kind; "" where it can."""
        if not linear.weight.dtype.is_floating_point or linear.weight.dtype.itemsize > 4:
            return f"its weight is {linear.weight.dtype}"
        return "" if bool(linear.weight.isfinite().all()) else "its weight is not finite"

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # nn.Linear's is a parameter
        """The weight that the layer multiplies with, in the dtype that it had."""
        return self.restore_weight(self.weight_dtype)

    def restore_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight (out, in) that the layer multiplies with, in `dtype`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """The layer's result, of the dtype of `x`."""
        return F.linear(x, self.restore_weight(x.dtype), self.bias)


class Int8Linear(QuantisedLinear):
    """Weights in int8 with a scale a row; products in the input's dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        scale = _scale_to(weight.float(), _INT8_MAX, weight.dtype)
        digits = (weight.float() / scale.float()).round().clamp(-_INT8_MAX, _INT8_MAX)
        self.register_buffer("digits", digits.to(torch.int8))
        self.register_buffer("scale", scale)

    def restore_weight(self, dtype: torch.dtype) -> Tensor:
        """See `QuantisedLinear`."""
        return self.digits.to(dtype) * self.scale.to(dtype)


class Int4Linear(QuantisedLinear):
    """Weights in 4 bits, two to a byte, with a scale for each group of a row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        rows, columns = weight.shape
        groups = weight.float().view(rows, -1, choose_group(columns))
        scale = _scale_to(groups, _INT4_MAX, weight.dtype)
        steps = (groups / scale.float()).round().clamp(-_INT4_MAX, _INT4_MAX)
        digits = (steps + _INT4_ZERO).to(torch.uint8).view(rows, columns // 2, 2)
        self.register_buffer("digits", digits[..., 0] | digits[..., 1] << 4)
        self.register_buffer("scale", scale)

    @classmethod
    def find_obstacle(cls, linear: nn.Linear) -> str:
        """See `QuantisedLinear`."""
        if not choose_group(linear.in_features):
            return f"its {linear.in_features} inputs are no multiple of {_INT4_GROUPS[-1]}"
        return super().find_obstacle(linear)

    def restore_weight(self, dtype: torch.dtype) -> Tensor:
        """See `QuantisedLinear`."""
        digits = torch.stack((self.digits & 15, self.digits >> 4), -1)
        groups = digits.view(self.out_features, self.scale.shape[1], -1).to(dtype)
        return ((groups - _INT4_ZERO) * self.scale.to(dtype)).view(
            self.out_features, self.in_features
        )


class Fp8Linear(QuantisedLinear):
    """Weights and inputs in e4m3 with a scale a row; sums in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        scale = _scale_to(weight, _FP8_MAX)
        self.register_buffer("digits", (weight / scale).to(_FP8).view(torch.uint8))
        self.register_buffer("scale", scale.view(1, -1))

    @classmethod
    def find_obstacle(cls, linear: nn.Linear) -> str:
        """See `QuantisedLinear`."""
        if linear.in_features % _FP8_STEP or linear.out_features % _FP8_STEP:
            return f"{linear.out_features} x {linear.in_features} is no multiple of {_FP8_STEP}"
        device = linear.weight.device
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            return "its GPU multiplies no e4m3 (that takes sm_89)"
        return super().find_obstacle(linear)

    def restore_weight(self, dtype: torch.dtype) -> Tensor:
        """See `QuantisedLinear`."""
        return (self.digits.view(_FP8).float() * self.scale.float().view(-1, 1)).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's result, of the dtype of `x`."""
        rows = x.reshape(-1, self.in_features)
        scale = _scale_to(rows.float(), _FP8_MAX)
        product = torch._scaled_mm(
            (rows.float() / scale).to(_FP8),
            self.digits.view(_FP8).t(),
            scale_a=scale,
            scale_b=self.scale.float(),
            # Row scales are for results of bf16.
            out_dtype=torch.bfloat16,
        )
        result = product.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias


def choose_group(columns: int) -> int:
    """Elements of a row that share a scale where weights have 4 bits; 0: the row has no such
    groups.
    """
    return next((size for size in _INT4_GROUPS if columns % size == 0), 0)


def _scale_to(numbers: Tensor, largest: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A scale of `dtype` for each vector of the last dimension, so that its largest magnitude becomes
    `largest`; 1 for a vector of zeros, or of numbers whose scale `dtype` rounds to 0.
    """
    # Rounded here, before anything is divided by it: digits make up for its rounding.
    scale = (numbers.abs().amax(-1, keepdim=True) / largest).to(dtype)
    return torch.where(scale > 0, scale, 1.0)
