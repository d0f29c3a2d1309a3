"""Our module is trained for two rounds, copied, and trained again.

A duty of our own runtime: no graph of autograd outlives its call.
"""

from __future__ import annotations

import copy

import torch

from tests.adversarial.case import Case
from tests.adversarial.swapped import is_answered_by_swap, swap_module

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
    with swap_module(x) as module:
        with torch.no_grad():
            module(x)
        for instance in (module, copy.deepcopy(module)):
            optimiser = torch.optim.SGD(instance.parameters(), lr=0.1)
            for _ in range(2):
                optimiser.zero_grad()
                instance(x).square().sum().backward()
                optimiser.step()


def twin() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swap_module(x) as module:
        assert is_answered_by_swap(module, x)
        assert is_answered_by_swap(module, torch.randn(3, 8))
