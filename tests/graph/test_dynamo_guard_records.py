"""Each object that a guard depends on gets one record, and the guard lets go when it changes."""

from __future__ import annotations

import functools
import threading
import types
from typing import Any

import pytest
import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.dynamo_guard_records import (
    RecordCollector,
    UnprovenError,
    is_torch_module,
)
from torch_cudal1.runtime.guard import ModuleGuard
from torch_cudal1.runtime.guard_builder import record_module


class Config:
    scale = 2

    def __init__(self) -> None:
        self.table = {"a": 1}
        self.items = [1, 2]


def collect(module: torch.nn.Module | None = None) -> RecordCollector:
    records = record_module(module or torch.nn.Linear(2, 2))
    assert not isinstance(records, Refusal)
    return RecordCollector(records)


def holds(collector: RecordCollector) -> bool:
    return ModuleGuard(collector.merge()).holds()


def test_what_the_walk_recorded_is_not_recorded_again() -> None:
    module = torch.nn.Linear(2, 2)
    collector = collect(module)
    before = collector.merge()
    assert collector.has_tensor(module.weight)
    assert collector.has_table(module._parameters)
    collector.add_content(module._parameters)
    collector.add_attribute_dict(module)
    assert collector.merge() == before


def change_table(config: Config) -> None:
    config.table["b"] = 2


def change_items(config: Config) -> None:
    config.items.append(3)


def change_attributes(config: Config) -> None:
    config.new = 1


def replace_attributes(config: Config) -> None:
    config.__dict__ = dict(config.__dict__)


def change_class(config: Config) -> None:
    config.__class__ = type("Other", (Config,), {})


def add_table(collector: RecordCollector, config: Config) -> Any:
    return collector.add_content(config.table)


def add_items(collector: RecordCollector, config: Config) -> Any:
    return collector.add_content(config.items)


def add_names(collector: RecordCollector, config: Config) -> Any:
    return collector.add_content(config, attributes=True)


def add_class(collector: RecordCollector, config: Config) -> Any:
    return collector.add_class(config)


@pytest.mark.parametrize(
    ("add", "change"),
    [
        (add_table, change_table),
        (add_items, change_items),
        (add_names, change_attributes),
        (add_names, replace_attributes),
        (add_class, change_class),
    ],
)
def test_a_record_holds_until_its_object_changes(add: Any, change: Any) -> None:
    config, collector = Config(), collect()
    assert add(collector, config)
    guard = ModuleGuard(collector.merge())
    assert guard.holds()
    change(config)
    assert not guard.holds()
    assert guard.explain_difference()


def test_a_name_is_compared_by_what_it_stands_for_unless_its_table_is() -> None:
    config, collector = Config(), collect()
    assert collector.add_lookup(config.table, "a", 1) == 1
    guard = ModuleGuard(collector.merge())
    config.table["b"] = 2
    assert guard.holds()
    config.table["a"] = 5
    assert not guard.holds()
    covered = collect()
    covered.add_content(config.table)
    before = covered.merge()
    covered.add_lookup(config.table, "a", 5)
    assert covered.merge() == before


def test_a_function_is_compared_by_its_code_and_defaults() -> None:
    def scale(x: int, by: int = 2, *, offset: int = 0) -> int:
        return x * by + offset

    collector = collect()
    collector.add_function(scale)
    guard = ModuleGuard(collector.merge())
    assert guard.holds()
    scale.__kwdefaults__["offset"] = 1
    assert not guard.holds()
    scale.__kwdefaults__["offset"] = 0
    assert guard.holds()
    scale.__defaults__ = (3,)
    assert not guard.holds()


def test_a_closure_variable_is_compared_by_its_content() -> None:
    gain = 2

    def multiply(x: int) -> int:
        return x * gain

    assert multiply.__closure__ is not None
    (cell,) = multiply.__closure__
    collector = collect()
    collector.add_cell(cell)
    guard = ModuleGuard(collector.merge())
    assert guard.holds()
    cell.cell_contents = 3
    assert not guard.holds()


@pytest.mark.parametrize(
    "value",
    [
        types.ModuleType("users"),
        dict.fromkeys(range(2000)),
        list(range(2000)),
        threading.local(),
        3,
    ],
    ids=["a Python module", "a large dict", "a large list", "a thread's own object", "a number"],
)
def test_content_that_no_record_can_compare_is_refused(value: Any) -> None:
    collector = collect()
    before = collector.merge()
    assert not collector.add_content(value)
    assert collector.merge() == before


def test_an_object_of_one_thread_proves_nothing_for_another() -> None:
    with pytest.raises(UnprovenError, match="one thread"):
        collect().add_attribute_dict(threading.local())


def test_names_of_torch_are_recorded_and_its_own_functions_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collector = collect()
    before = collector.merge()
    collector.add_function(torch.nn.functional.relu)
    assert collector.merge() == before

    @functools.wraps(torch.nn.functional.relu)
    def disguised(x: int) -> int:
        return x

    collector.add_function(disguised)
    assert len(collector.merge().functions) == len(before.functions) + 1
    collector.add_lookup(vars(torch), "relu", torch.relu)
    assert holds(collector)
    monkeypatch.setattr(torch, "relu", torch.tanh)
    assert not holds(collector)
    assert is_torch_module("torch.nn.functional")
    assert not is_torch_module("torchvision")
