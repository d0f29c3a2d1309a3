"""A swap that was judged without gradients is called with them.

A duty of our own runtime: the mode is part of the guard, so the module's own forward answers and gradients are there.
"""

from __future__ import annotations

import torch

from tests.adversarial.case import Case
from tests.adversarial.swapped import answered_by_swap, swapped

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
    with swapped(x) as module:
        assert not answered_by_swap(module, x)
        given = x.clone().requires_grad_()
        module(given).sum().backward()
        assert given.grad is not None
        assert module.linear.weight.grad is not None


def twin() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swapped(x) as module:
        assert answered_by_swap(module, x)
        assert answered_by_swap(module, torch.randn(3, 8))
