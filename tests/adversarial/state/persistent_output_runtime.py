"""The caller holds results of our module over later calls.

A duty of our own runtime: each result has memory of its own, whatever plan, graph or pool computed it.
"""

from __future__ import annotations

import torch

from tests.adversarial.case import Case
from tests.adversarial.swapped import is_answered_by_swap, own, swap_module

CASE = Case(
    33,
    "persistent_output",
    "state",
    expected="fresh_output",
    status="runtime",
    form="runtime",
    variant="runtime",
    seen=("L1",),
)


def attack() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swap_module(x, visible=False) as module:
        inputs = [torch.randn(3, 8) for _ in range(6)]
        outputs = [module(tensor) for tensor in inputs]
        assert len({result.data_ptr() for result in outputs}) == len(outputs)
        assert all(
            torch.allclose(result, own(module, tensor))
            for result, tensor in zip(outputs, inputs, strict=True)
        )


def twin() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swap_module(x) as module:
        assert all(
            is_answered_by_swap(module, torch.randn(3, 8)) for _ in range(6)
        )  # each result dies before the next call
