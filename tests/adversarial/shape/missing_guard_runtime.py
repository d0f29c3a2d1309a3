"""Our module is called just outside of what its swap was judged on: other shapes, strides, types, modes, and a subclass.

A duty of our own runtime: what was tested is the guard; everything else reaches the module's own forward.
"""

from __future__ import annotations

import torch

from tests.adversarial.case import Case
from tests.adversarial.swapped import is_answered_by_swap, swap_module

CASE = Case(
    43,
    "missing_guard",
    "shape",
    expected="guard_domain",
    status="runtime",
    form="runtime",
    variant="runtime",
    seen=("L1",),
)


class Marked(torch.Tensor):
    """A subclass that does nothing, which the swap has never met."""


def attack() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swap_module(x) as module:
        for outside in (
            torch.randn(4, 8),
            torch.randn(1, 8),
            torch.randn(2, 3, 8),
            torch.randn(8, 3).t(),
            torch.randn(3, 16)[:, ::2],
            torch.randn(3, 8).as_subclass(Marked),
        ):
            assert not is_answered_by_swap(module, outside), (
                tuple(outside.shape),
                outside.stride(),
                type(outside),
            )
        module.double()
        assert not is_answered_by_swap(module, x.double())


def twin() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swap_module(x) as module:
        assert is_answered_by_swap(module, x)
        assert is_answered_by_swap(module, torch.randn(3, 8))
