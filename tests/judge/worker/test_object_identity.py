"""Another object behind a name changes the digests, and a module that was added does not."""

from __future__ import annotations

import sys

import pytest
import torch

from torch_cudal1.judge.worker.global_state import read_global_state
from torch_cudal1.judge.worker.object_identity import digest_identities


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
    }
    for case, (owner, name, value) in cases.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            state = read_global_state(torch.device("cpu"))
        assert state["digests"]["identities"] != before["digests"]["identities"], case
        assert state["identities"] != before["identities"], case
        assert state["digests"]["modules"] == before["digests"]["modules"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "a_new_one", sys)
        assert digest_identities() == before["digests"], "modules may be added"
        patch.setitem(sys.modules, "json", sys)
        assert digest_identities()["modules"] != before["digests"]["modules"]
    assert digest_identities() == before["digests"]
