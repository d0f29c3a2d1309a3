"""Test helper: modules whose forward has a habit that a capture has to follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Closed(nn.Module):
    """minGPT's habit: part of the forward is a function over the module's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        parts = self.parts
        inner = lambda x: parts["up"](x).relu()
        self.mlp = lambda x: parts["down"](inner(x))
        self.mlp.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x) * self.mlp.scale


class Returns(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)
