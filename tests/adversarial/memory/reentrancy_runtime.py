"""Our module is called by four threads at once, each with inputs of its own.

A duty of our own runtime: scratch belongs to a call, not to the module.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from tests.adversarial.case import Case
from tests.adversarial.swapped import answered_by_swap, own, swapped

CASE = Case(
    51,
    "reentrancy",
    "memory",
    expected="reentrancy",
    status="runtime",
    form="runtime",
    variant="runtime",
    seen=("L1",),
)


def attack() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swapped(x, visible=False) as module:

        def work(seed: int) -> bool:
            given = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                expected = own(module, given)
                return all(torch.allclose(module(given), expected) for _ in range(50))

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(8)))


def twin() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swapped(x) as module:
        assert answered_by_swap(module, x)
        assert answered_by_swap(module, torch.randn(3, 8))
