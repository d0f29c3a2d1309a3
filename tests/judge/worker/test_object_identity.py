"""Another object behind a name changes the digests, and a module that was added does not."""

from __future__ import annotations

import copyreg
import math
import sys
from typing import Any

import pytest
import torch

from torch_cudal1.judge.worker.global_state import read_global_state
from torch_cudal1.judge.worker.object_identity import digest_identities, read_identities


def _find_cell(function: Any) -> Any:
    return next(cell for cell in function.__closure__ if callable(cell.cell_contents))


def test_an_optimizer_made_later_changes_nothing() -> None:
    owners = ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW", "torch.optim.optimizer.Optimizer")
    before = read_identities()
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.optim.AdamW([parameter]).step()
    after = read_identities()
    steps = [
        (table[owner].get("step"), table[owner].get("+step"))
        for table in (before, after)
        for owner in owners
    ]
    assert steps[: len(owners)] == steps[len(owners) :]


def test_digests_change_exactly_where_the_tables_do(monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_global_state(torch.device("cpu"))
    assert read_global_state(torch.device("cpu"), tables=False) == {
        group: values for group, values in before.items() if group not in ("modules", "identities")
    }
    cases = {
        "a function": (torch, "allclose", lambda *a, **group: True),
        "its defaults": (torch.testing.assert_close, "__kwdefaults__", {"rtol": 1.0}),
        "its code": (torch.testing.assert_close, "__code__", (lambda *a, **group: None).__code__),
        "a name of a base class": (torch.nn.Linear, "__call__", print),
        "a name of Python's": (torch, "sorted", print),
        "a method of an optimizer": (torch.optim.SGD, "step", print),
        "a context": (torch.set_grad_enabled, "__enter__", print),
        "a method of functions": (torch.autograd.Function, "apply", print),
        "a module in a module": (torch.functional, "_VF", torch),
        "a dtype": (torch, "double", torch.float32),
        "a number": (math, "pi", 3.0),
        "what a closure holds": (
            _find_cell(torch.nn.functional.max_pool2d),
            "cell_contents",
            print,
        ),
    }
    for case, (owner, name, value) in cases.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            state = read_global_state(torch.device("cpu"))
        assert state["digests"]["identities"] != before["digests"]["identities"], case
        assert state["identities"] != before["identities"], case
        assert state["digests"]["modules"] == before["digests"]["modules"]
    entries: dict[str, tuple[Any, Any]] = {
        "a default": (torch.nn.Module.register_forward_hook.__kwdefaults__, "prepend"),
        "a reducer": (copyreg.dispatch_table, torch.nn.Linear),
    }
    for case, (entry, key) in entries.items():
        with monkeypatch.context() as patch:
            patch.setitem(entry, key, print)
            state = read_global_state(torch.device("cpu"))
        assert state["digests"]["identities"] != before["digests"]["identities"], case
        assert state["identities"] != before["identities"], case
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "a_new_one", sys)
        assert digest_identities() == before["digests"], "modules may be added"
        patch.setitem(sys.modules, "json", sys)
        assert digest_identities()["modules"] != before["digests"]["modules"]
    assert digest_identities() == before["digests"]
