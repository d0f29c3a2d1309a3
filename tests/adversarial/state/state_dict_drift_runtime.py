"""State dict, names, copies and pickles of our module are compared with those of the plain one.

A duty of our own runtime: a module is the user's own before, during and after the swap.
"""

from __future__ import annotations

import copy
import pickle

import torch

from tests.adversarial.case import Case
from tests.adversarial.swapped import Layer, is_answered_by_swap, own, swap_module

CASE = Case(
    37,
    "state_dict_drift",
    "state",
    expected="mode",
    status="runtime",
    form="runtime",
    variant="runtime",
    seen=("L1",),
)


def attack() -> None:
    x = torch.randn(3, 8)
    plain = Layer()
    with torch.no_grad(), swap_module(x, visible=False) as module:
        module(x)
        assert list(module.state_dict()) == list(plain.state_dict())
        assert type(module) is Layer
        plain.load_state_dict(module.state_dict(), strict=True)
        assert torch.equal(plain(x), own(module, x))
        assert torch.equal(pickle.loads(pickle.dumps(module))(x), plain(x))  # noqa: S301  our own bytes
        assert torch.equal(copy.deepcopy(module).double()(x.double()), plain.double()(x.double()))


def twin() -> None:
    x = torch.randn(3, 8)
    with torch.no_grad(), swap_module(x) as module:
        assert is_answered_by_swap(module, x)
        assert is_answered_by_swap(module, torch.randn(3, 8))
