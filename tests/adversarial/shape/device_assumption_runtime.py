"""A swap that was judged for tensors of one device is given tensors of another.

A duty of our own runtime: the device is part of the guard, so the module's own forward answers.
"""

from __future__ import annotations

import torch

from tests.adversarial.case import Case
from tests.adversarial.swapped import is_answered_by_swap, swap_module

CASE = Case(
    47,
    "device_assumption",
    "shape",
    expected="guard_domain",
    status="runtime",
    form="runtime",
    variant="runtime",
    seen=("L1",),
)


def attack() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swap_module(x) as module:
        module.to("meta")
        assert module(x.to("meta")).device.type == "meta"
        if torch.cuda.is_available():
            module.to_empty(device="cuda")
            assert module(x.cuda()).device.type == "cuda"


def twin() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swap_module(x) as module:
        assert is_answered_by_swap(module, x)
        assert is_answered_by_swap(module, torch.randn(3, 8))
