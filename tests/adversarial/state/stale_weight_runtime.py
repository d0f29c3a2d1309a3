"""Weights of our module are changed in every way a user can, those that no version counter sees included.

A duty of our own runtime: the swapped Program reads the parameters of the moment, or its guard sends the call to the baseline.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.adversarial.case import Case
from tests.adversarial.swapped import is_answered_by_swap, own, swap_module

CASE = Case(
    35,
    "stale_weight",
    "state",
    expected="update_path",
    status="runtime",
    form="runtime",
    variant="runtime",
    seen=("L1",),
)


def changes(module: torch.nn.Module) -> dict[str, Callable[[], object]]:
    weight = module.linear.weight
    fused = torch.optim.SGD(module.parameters(), lr=0.1, fused=True)

    def step() -> None:
        weight.grad = torch.ones_like(weight)
        fused.step()
        weight.grad = None

    return {
        "copy_": lambda: weight.copy_(torch.randn(8, 8)),
        "data.copy_": lambda: weight.data.copy_(torch.randn(8, 8)),
        "data =": lambda: setattr(weight, "data", torch.randn(8, 8)),
        "numpy view": lambda: weight.detach().numpy().__setitem__((0, 0), 7.0),
        "load_state_dict": lambda: module.load_state_dict(
            {"linear.weight": torch.randn(8, 8), "linear.bias": torch.ones(8)}
        ),
        "fused step": step,
        "assign": lambda: module.load_state_dict(
            {"linear.weight": torch.randn(8, 8), "linear.bias": torch.ones(8)}, assign=True
        ),
        "another Parameter": lambda: setattr(
            module.linear, "weight", torch.nn.Parameter(torch.randn(8, 8))
        ),
    }


def attack() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swap_module(x, visible=False) as module:
        for name in changes(module):
            before = module(x)
            changes(module)[name]()
            assert torch.allclose(module(x), own(module, x)), name
            assert not torch.allclose(module(x), before), f"{name} changed nothing"


def twin() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swap_module(x) as module:
        assert is_answered_by_swap(module, x)
        assert is_answered_by_swap(module, torch.randn(3, 8))
