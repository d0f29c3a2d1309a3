"""The visit of traced code records what its names lead to, and stops at torch and at code that was
not traced.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_cudal1.graph import traced_code
from torch_cudal1.graph.dynamo_guard_records import RecordCollector
from torch_cudal1.graph.traced_code import (
    CodeVisitor,
    describe_code,
    find_compiler_question,
    list_own_code,
)
from torch_cudal1.runtime.guard import ModuleGuard
from torch_cudal1.runtime.guard_records import ABSENT, GuardRecords

SWITCHES = types.ModuleType("switches")


class Helper:
    """What a forward may use."""

    gain = 2.0

    def apply(self, x: Any) -> Any:
        return inner(x) * abs(2)

    @staticmethod
    def shift(x: Any) -> Any:
        return x + 1

    @classmethod
    def scale(cls, x: Any) -> Any:
        return x * 2

    @property
    def half(self) -> float:
        return 0.5

    @functools.cached_property
    def third(self) -> float:
        return 1 / 3

    bound = functools.partialmethod(scale)


def inner(x: Any) -> Any:
    return torch.sin(x) if hasattr(SWITCHES, "fast") else math.erf(x)


@functools.lru_cache
def compute_size() -> int:
    return 3


def visit(value: Any, *functions: Any) -> tuple[GuardRecords, CodeVisitor]:
    collector = RecordCollector(GuardRecords.make_empty())
    visitor = CodeVisitor({describe_code(item.__code__) for item in functions}, collector)
    visitor.visit(value)
    return collector.merge(), visitor


def list_functions(records: GuardRecords) -> set[str]:
    return {record.function.__name__ for record in records.functions}


@pytest.mark.parametrize("value", [Helper(), Helper, Helper().apply, Helper.scale])
def test_the_body_of_a_class_is_recorded_and_its_traced_functions(value: Any) -> None:
    records, _ = visit(value, Helper.apply, inner)
    assert [table.owner for table in records.dict_contents] == [Helper]
    assert list_functions(records) == {"apply", "inner"}


@pytest.mark.parametrize(
    "name", ["apply", "shift", "scale", "half", "third", "bound", "compute_size"]
)
def test_a_function_is_found_in_what_wraps_it(name: str) -> None:
    wrapper = globals().get(name, vars(Helper).get(name))
    (function,) = {
        getattr(wrapper, place)
        for place in ("__func__", "fget", "func", "__wrapped__")
        if hasattr(wrapper, place)
    } or {wrapper}
    function = getattr(function, "__func__", function)
    records, _ = visit(compute_size if name == "compute_size" else Helper, function)
    assert function.__name__ in list_functions(records)


def test_names_lead_to_functions_modules_and_what_is_not_there() -> None:
    records, _ = visit(inner, inner)
    names = {(record.key, record.value) for record in records.names if record.key != "__name__"}
    assert {("torch", torch), ("sin", torch.sin), ("erf", math.erf), ("fast", ABSENT)} <= names
    # Before the builtin a name of the file's own would count.
    assert {("hasattr", ABSENT), ("hasattr", hasattr)} <= names
    guard = ModuleGuard(records)
    assert guard.holds()
    SWITCHES.fast = True  # type: ignore[attr-defined]
    try:
        assert not guard.holds()
    finally:
        del SWITCHES.fast  # type: ignore[attr-defined]
    assert guard.holds()


def test_code_that_was_not_traced_is_not_followed() -> None:
    # `apply` leads to it.
    records, _ = visit(Helper(), inner)
    assert records.functions == records.names == ()


def test_numbers_are_left_to_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    function = eval("lambda x: x * FACTOR", globals())
    records, _ = visit(function, function)
    assert "FACTOR" not in {record.key for record in records.names}


def test_what_a_closure_holds_is_visited() -> None:
    def make(kind: type, number: int) -> Callable[[Any], Any]:
        return lambda x: kind.scale(x) * number  # type: ignore[attr-defined]

    function = make(Helper, 3)
    records, _ = visit(function, function)
    assert [record.value for record in records.closure_cells] == [Helper]
    assert [table.owner for table in records.dict_contents] == [Helper]


def test_an_import_in_a_function_is_a_name_too() -> None:
    def compute(x: float) -> float:
        import math

        return math.erf(x)

    records, _ = visit(compute, compute)
    assert math.erf in [record.value for record in records.names]


def test_code_that_no_value_leads_to_is_read_by_its_file() -> None:
    _, visitor = visit(Helper, Helper.apply)
    codes = list_own_code([Helper.apply.__code__, inner.__code__])
    # `apply` has led to `inner`, of which it knew nothing.
    assert visitor.visit_remaining(codes) == []
    collector = RecordCollector(GuardRecords.make_empty())
    visitor = CodeVisitor(codes, collector)
    assert set(visitor.visit_remaining(codes)) == set(codes)
    assert math.erf in [record.value for record in collector.merge().names]
    assert visitor.visit_remaining(codes) == []


def test_code_of_a_file_that_is_no_module_has_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    function = eval(compile("lambda x: abs(x)", "/nowhere/code.py", "eval"))
    collector = RecordCollector(GuardRecords.make_empty())
    codes = list_own_code([function.__code__])
    assert list(CodeVisitor(codes, collector).visit_remaining(codes)) == list(codes)
    assert collector.count == 0


def test_torch_the_standard_library_and_this_package_are_not_the_users() -> None:
    functions: list[Any] = [
        torch.nn.Linear.forward,
        contextlib.contextmanager,
        traced_code.list_own_code,
    ]
    assert list_own_code([function.__code__ for function in functions]) == {}
    assert visit(torch.nn.Linear, torch.nn.Linear.forward)[0].dict_contents == ()


def test_own_code_that_asks_whether_it_is_compiled_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(x: Any) -> Any:
        return x if torch.compiler.is_compiling() else -x

    refusal = find_compiler_question([inner.__code__, ask.__code__])
    assert refusal is not None
    assert "asks `is_compiling`" in refusal.reason
    assert find_compiler_question([inner.__code__]) is None
    # A library asks in order to compute the same.
    monkeypatch.setattr(traced_code, "is_library_file", lambda path: path == __file__)
    assert find_compiler_question([ask.__code__]) is None


def test_data_of_a_class_may_change() -> None:
    records, _ = visit(Helper(), Helper.apply, inner)
    guard = ModuleGuard(records)
    before = vars(Helper).get("calls", 0)
    try:
        Helper.calls = before + 1  # type: ignore[attr-defined]
        Helper.__doc__ = "changed"
        assert guard.holds()
    finally:
        del Helper.calls  # type: ignore[attr-defined]


def test_a_global_with_the_name_of_an_attribute_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    function = eval("lambda x: x.state * 2", globals())
    monkeypatch.setitem(globals(), "state", object())
    records, _ = visit(function, function)
    guard = ModuleGuard(records)
    monkeypatch.setitem(globals(), "state", object())
    assert guard.holds()


def test_a_class_that_claims_to_be_pythons_own_is_the_users() -> None:
    kind = dataclasses.make_dataclass("Kind", [("gain", float)], namespace={"apply": inner})
    assert kind.__module__ == "types"
    records, _ = visit(kind(1.0), inner)
    assert [table.owner for table in records.dict_contents] == [kind]
    assert visit(collections.OrderedDict(), inner)[0].dict_contents == ()


def test_a_python_module_in_a_closure_is_looked_into() -> None:
    def make() -> Callable[[Any], Any]:
        import math as functions

        return lambda x: functions.erf(x)

    function = make()
    records, _ = visit(function, function)
    assert math.erf in [record.value for record in records.names]
