"""Test helper: accelerated modules with planted swaps beside plain twins, and their gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_cudal1
from tests.entries import plant


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def accelerate_pair(module: nn.Module, args: Any, tmp_path: Path) -> tuple[nn.Module, nn.Module]:
    """An accelerated module with planted swaps, and a plain twin."""
    twin = copy.deepcopy(module)
    plant(module, args, tmp_path)
    return torch_cudal1.accelerate(module, args, cache_dir=tmp_path, strictness="error"), twin


def collect_gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same_gradients(accelerated: nn.Module, plain: nn.Module) -> None:
    for name, expected in collect_gradients(plain).items():
        torch.testing.assert_close(
            collect_gradients(accelerated)[name],
            expected,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def make_input(rows: int = 5, *, grad: bool = False) -> torch.Tensor:
    return torch.randn(rows, 8, requires_grad=grad)


def shorten_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure whole calls for a moment only, where what is measured is of no interest."""
    monkeypatch.setattr("torch_cudal1.api.end_to_end._BUDGET_S", 0.1)
