"""A swap that was judged without gradients is called with them.

A duty of our own runtime: the mode is part of the guard, so the module's own forward answers and gradients are there.
"""

from __future__ import annotations

import torch

from tests.adversarial.case import Case
from tests.adversarial.swapped import is_answered_by_swap, swap_module

CASE = Case(
    39,
    "no_gradient",
    "autograd",
    expected="grad",
    status="runtime",
    form="runtime",
    variant="runtime",
    seen=("L1",),
)


def attack() -> None:
    x = torch.randn(3, 8)
    with swap_module(x) as module:
        assert not is_answered_by_swap(module, x)
        leaf = x.clone().requires_grad_()
        module(leaf).sum().backward()
        assert leaf.grad is not None
        assert module.linear.weight.grad is not None


def twin() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swap_module(x) as module:
        assert is_answered_by_swap(module, x)
        assert is_answered_by_swap(module, torch.randn(3, 8))
