"""Our module is called by four threads at once, each with inputs of its own.

A duty of our own runtime: scratch belongs to a call, not to the module.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from tests.adversarial.case import Case
from tests.adversarial.swapped import is_answered_by_swap, own, swap_module

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
    with torch.no_grad(), swap_module(x, visible=False) as module:

        def work(seed: int) -> bool:
            inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                expected = own(module, inputs)
                return all(torch.allclose(module(inputs), expected) for _ in range(50))

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(8)))


def twin() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swap_module(x) as module:
        assert is_answered_by_swap(module, x)
        assert is_answered_by_swap(module, torch.randn(3, 8))
