"""Our module is trained for two rounds, copied, and trained again.

A duty of our own runtime: no graph of autograd outlives its call.
"""

from __future__ import annotations

import copy

import torch

from tests.adversarial.case import Case
from tests.adversarial.swapped import answered_by_swap, swapped

CASE = Case(
    42,
    "works_once",
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
        with torch.no_grad():
            module(x)
        for one in (module, copy.deepcopy(module)):
            optimiser = torch.optim.SGD(one.parameters(), lr=0.1)
            for _ in range(2):
                optimiser.zero_grad()
                one(x).square().sum().backward()
                optimiser.step()


def twin() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swapped(x) as module:
        assert answered_by_swap(module, x)
        assert answered_by_swap(module, torch.randn(3, 8))
