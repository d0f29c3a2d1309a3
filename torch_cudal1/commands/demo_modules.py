# mypy: disable-error-code="no-any-return"
"""The models of `cudal1 demo`: small enough for a laptop, each showing one thing that real models contain.

Ordinary PyTorch code, written as a user would write it; nothing here knows that it will be accelerated. Sizes are the same on CPU
and GPU, so that tables of different machines can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "Model"]

Inputs: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Model:
    """One demo model: `build()` gives a module in eval mode and its inputs, on the CPU, the same at every call under one seed."""

    name: str
    description: str
    build: Callable[[], tuple[nn.Module, Inputs]]


class DiagMatmul(nn.Module):
    """diag(a) @ b, a (n,), b (n, n): a full matrix product where n^2 multiplications are enough."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.diag(a) @ b


class LinearThenSum(nn.Module):
    """Linear, then a sum over the features it made, then a scale: (128, 1024) -> (128, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1024, 4096)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum(dim=1, keepdim=True) * 0.5


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation and a skip: (8, 64, 28, 28) -> the same."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        for bn in (self.bn1, self.bn2):  # as after training: statistics that are not 0 and 1
            nn.init.uniform_(bn.running_mean, -0.3, 0.3)  # type: ignore[arg-type]
            nn.init.uniform_(bn.running_var, 0.5, 2.0)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + x)


class GeluMlp(nn.Module):
    """The feed-forward part of a transformer: (512, 256) -> (512, 256) through 1024 features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Recurrent(nn.Module):
    """One LSTM layer and a read-out of its last step: (8, 48, 64) -> (8, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class UpsampleThenMean(nn.Module):
    """Transposed 3-D convolution, a scale, then the mean over all positions: (4, 16, 8, 16, 16) -> (4, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(16, 32, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.up(x) * 2.0).mean(dim=(2, 3, 4))


class SelfAttention(nn.Module):
    """Attention with three sibling Linears over the same input: (4, 128, 256) -> the same, 4 heads."""

    def __init__(self, features: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(features, features) for _ in range(3))
        self.out = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MinThenClamp(nn.Module):
    """Convolution, minimum with 0, clamp to [0, 1]: 0 if finite, NaN for NaN. (4, 3, 8, 32, 32) -> (4, 16, 6, 30, 30)."""

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
    ),
    Model(
        "LinearThenSum",
        "A Linear whose 4096 outputs are only summed: the sum can go into the weights.",
        lambda: _eval(LinearThenSum(), 128, 1024),
    ),
    Model(
        "ResidualBlock",
        "A ResNet block in eval mode: batch normalisation can go into the convolutions.",
        lambda: _eval(ResidualBlock(), 8, 64, 28, 28),
    ),
    Model(
        "TransformerEncoder",
        "torch.nn.TransformerEncoderLayer, 256 features, 4 heads, 128 positions, in eval mode.",
        lambda: _eval(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True), 4, 128, 256),
    ),
    Model("GeluMlp", "A feed-forward block with exact GELU.", lambda: _eval(GeluMlp(), 512, 256)),
    Model(
        "Recurrent",
        "An LSTM layer over 48 steps: many small operations, where overhead counts.",
        lambda: _eval(Recurrent(), 8, 48, 64),
    ),
    Model(
        "UpsampleThenMean",
        "A transposed 3-D convolution whose output is only averaged: the mean can go before it.",
        lambda: _eval(UpsampleThenMean(), 4, 16, 8, 16, 16),
    ),
    Model(
        "SelfAttention",
        "Attention with three sibling Linears: one wide product can do the work of three.",
        lambda: _eval(SelfAttention(), 4, 128, 256),
    ),
    Model(
        "MinThenClamp",
        "Always 0 for finite inputs, but NaN must stay NaN: the shortcut is refused unless you say assume_finite=True.",
        lambda: _eval(MinThenClamp(), 4, 3, 8, 32, 32),
    ),
)
