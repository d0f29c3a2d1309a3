# mypy: disable-error-code="no-any-return"
"""The models of `cudal1 demo`: small enough for a laptop, each showing one thing that real models
contain.

Ordinary PyTorch code, written as a user would write it; nothing here knows that it will be
accelerated. Sizes are the same on CPU and GPU, so that tables of different machines can be
compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "Model"]

Inputs: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Model:
    """One demo model: `build()` gives a module in eval mode and its inputs, on the CPU, the same at
    every call under one seed.

    `weight` is its share of the demo's time, `assume_finite` what its user promises.
    """

    name: str
    description: str
    build: Callable[[], tuple[nn.Module, Inputs]]
    weight: float = 1.0
    assume_finite: bool = False


class DiagMatmul(nn.Module):
    """diag(a) @ b, a (n,), b (n, n): a full matrix product where n^2 multiplications are enough."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.diag(a) @ b


class ConvThenSum(nn.Module):
    """A convolution whose channels are only summed: (4, 32, 48, 48) -> (4, 1, 48, 48)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 128, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x).sum(dim=1, keepdim=True))


class LinearThenSum(nn.Module):
    """Linear, then a sum over the features it made, then a scale: (256, 512) -> (256, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 2048)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum(dim=1, keepdim=True) * 0.5


class Recurrent(nn.Module):
    """One LSTM layer and a read-out of its last step: (16, 32, 64) -> (8, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class MinThenClamp(nn.Module):
    """Convolution, minimum with 0, clamp to [0, 1]: 0 if finite, NaN for NaN. (4, 3, 8, 32, 32) ->
    (4, 16, 6, 30, 30).
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 16, 3)
        self.norm = nn.GroupNorm(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return torch.clamp(torch.minimum(x, torch.zeros_like(x)), 0.0, 1.0)


def _eval(module: nn.Module, *shape: int) -> tuple[nn.Module, Inputs]:
    return module.eval(), (torch.randn(*shape),)


MODELS = (
    Model(
        "DiagMatmul",
        "diag(a) @ b with n = 4096 (KernelBench level 1, problem 12): a full matrix product where scaling the rows is enough.",
        lambda: (DiagMatmul().eval(), (torch.randn(4096), torch.randn(4096, 4096))),
        weight=2.5,
    ),
    Model(
        "MinThenClamp",
        "Always 0 for finite values, but NaN must stay NaN: the shortcut needs the user's promise assume_finite=True, given here.",
        lambda: _eval(MinThenClamp(), 4, 3, 8, 32, 32),
        weight=1.6,
        assume_finite=True,
    ),
    Model(
        "ConvThenSum",
        "A convolution whose 128 channels are only summed: the sum can go into the weights.",
        lambda: _eval(ConvThenSum(), 4, 32, 48, 48),
        weight=1.6,
    ),
    Model(
        "LinearThenSum",
        "A Linear whose 2048 outputs are only summed: the sum can go into the weights, if that stays as exact.",
        lambda: _eval(LinearThenSum(), 256, 512),
        weight=1.6,
    ),
    Model(
        "TransformerEncoder",
        "torch.nn.TransformerEncoderLayer, 256 features, 4 heads, 128 positions, in eval mode.",
        lambda: _eval(
            nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True), 4, 128, 256
        ),
        weight=0.7,
    ),
    Model(
        "Recurrent",
        "An LSTM layer over 32 steps: many small operations, where overhead counts.",
        lambda: _eval(Recurrent(), 16, 32, 64),
        weight=0.7,
    ),
)
