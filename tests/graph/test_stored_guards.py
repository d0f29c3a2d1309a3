"""What a capture read is stored as JSON, and read again without Dynamo: the same records."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.dynamo_guard_records import UnprovenError
from torch_cudal1.graph.module_call import capture_module_call
from torch_cudal1.graph.stored_guards import (
    StoredGuards,
    read_stored_guards,
)
from torch_cudal1.runtime.guard_builder import record_module
from torch_cudal1.runtime.guard_records import GuardRecords
from torch_cudal1.runtime.record_digest import compute_record_digest

pytestmark = pytest.mark.usefixtures("dynamo")
BIAS = 0.5


def shift(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return x + by


class Shifted(nn.Module):
    """Reads globals through a function of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift(self.linear(x)) * BIAS


def store(module: nn.Module, *args: Any) -> StoredGuards:
    stored = capture_module_call(module, args, {}).stored
    assert not isinstance(stored, Refusal), stored.reason
    # Through text, as the cache keeps it.
    return StoredGuards.from_json(json.loads(json.dumps(stored.to_json())))


def walk(module: nn.Module) -> GuardRecords:
    records = record_module(module)
    assert not isinstance(records, Refusal)
    return records


def test_the_same_records_are_read_of_another_object() -> None:
    x = torch.randn(2, 4)
    first, second = Shifted(), Shifted()
    stored = store(first, x)
    digests = []
    for module in (first, second):
        present = read_stored_guards(stored, module, walk(module))
        digests.append(compute_record_digest(present.records))
        tensors = [item for item in present.placeholders if isinstance(item, torch.Tensor)]
        assert {id(item) for item in tensors} == {id(item) for item in module.parameters()}
        assert [item for item in present.placeholders if isinstance(item, int)] == [0]
    assert digests[0] == digests[1]


def test_what_is_not_there_is_said() -> None:
    stored = store(Shifted(), torch.randn(2, 4))
    other = nn.Linear(4, 4)
    with pytest.raises((UnprovenError, LookupError, AttributeError)):
        read_stored_guards(stored, other, walk(other))


@pytest.mark.parametrize(
    "steps",
    [
        [],
        "damaged",
        [["LocalSource", {"local_name": "args"}]],
        [["Unknown", {}]] * 2,
        [["A", {"b": 1}]],
    ],
)
def test_damaged_steps_are_refused(steps: Any) -> None:
    module = Shifted()
    damaged = StoredGuards((), (steps,), (), (), ())
    with pytest.raises((UnprovenError, ValueError)):
        read_stored_guards(damaged, module, walk(module))


class Setting:
    """A number behind a property."""

    def __init__(self) -> None:
        self.half = 1

    @property
    def whole(self) -> int:
        return 2 * self.half


def test_what_no_record_implies_is_asked_at_every_call() -> None:
    module = Shifted()
    module.setting = Setting()
    records = walk(module)
    assert read_stored_guards(StoredGuards((), (), (), (), ()), module, records).check is None
    place = [["LocalSource", {"local_name": "module"}], ["AttrSource", {"member": "setting"}]]
    checks = (
        ["has attribute", "kwargs", ["x"], "tag", False],
        ["has attribute", "args", [0, 1], "tag", True],
        ["property", place, "GenericAttrSource", "whole", 2],
    )
    check = read_stored_guards(StoredGuards((), (), (), checks, ()), module, records).check
    assert check is not None
    plain, tagged = torch.zeros(1), torch.zeros(1)
    tagged.tag = 1  # type: ignore[attr-defined]
    scope = {"args": ((plain, tagged),), "kwargs": {"x": plain}}
    assert check(scope)
    assert not check({**scope, "args": ((plain, plain),)})
    assert not check({**scope, "kwargs": {"x": tagged}})
    module.setting.half = 2
    assert not check(scope)
    no_property = StoredGuards((), (), (), (["property", place, "AttrSource", "half", 1],), ())
    with pytest.raises(UnprovenError):
        read_stored_guards(no_property, module, records)
