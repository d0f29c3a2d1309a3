"""The digest of a state: equal for equal states, whatever the addresses; another for any other."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.runtime.guard_builder import record_module
from torch_cudal1.runtime.record_digest import compute_record_digest


class Gate(nn.Module):
    """One of everything that a walk records."""

    limit = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.inner = nn.ReLU()
        self.names = {"a", "b", "c"}
        self.table = {"x": [1, 2.5, None], "dtype": torch.float16}
        self.call = functools.partial(torch.add, alpha=2)
        self.shape = torch.Size([2, 3])
        self.blob = bytearray(b"ab")
        self.lock = {"a": self.inner, "b": self.inner}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.limit


def digest(module: nn.Module) -> str:
    records = record_module(module)
    assert not isinstance(records, Refusal)
    return compute_record_digest(records)


def test_two_objects_in_one_state_have_one_digest() -> None:
    assert digest(Gate()) == digest(Gate())
    # Values of tensors are no state.
    other = Gate()
    nn.init.ones_(other.weight)
    assert digest(other) == digest(Gate())


def assign(name: str, value: Any) -> Callable[[Gate], None]:
    return lambda gate: setattr(gate, name, value)


CHANGES: dict[str, Callable[[Gate], None]] = {
    "shape": assign("weight", nn.Parameter(torch.zeros(3, 2))),
    "dtype of a tensor": assign("weight", nn.Parameter(torch.zeros(2, 3, dtype=torch.float16))),
    "frozen": lambda gate: setattr(gate.weight, "requires_grad", False),
    "class": assign("inner", nn.GELU()),
    "mode": lambda gate: setattr(gate.inner, "training", False),
    "item of a set": lambda gate: gate.names.add("d"),
    "item of a list": lambda gate: gate.table["x"].append(1),
    "type of a number": lambda gate: gate.table["x"].__setitem__(0, True),
    "order of keys": assign("table", {"dtype": torch.float16, "x": [1, 2.5, None]}),
    "dtype": lambda gate: gate.table.update(dtype=torch.bfloat16),
    "keyword of a partial": assign("call", functools.partial(torch.add, alpha=3)),
    "function of a partial": assign("call", functools.partial(torch.sub, alpha=2)),
    "bytes": lambda gate: gate.blob.extend(b"c"),
    "one object in place of two": lambda gate: gate.lock.update(b=nn.ReLU()),
    "another attribute": assign("extra", 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_another_state_has_another_digest(change: Callable[[Gate], None]) -> None:
    gate = Gate()
    change(gate)
    assert digest(gate) != digest(Gate())


def make_class(factor: float, doc: str = "") -> type[nn.Module]:
    class Scaled(nn.Module):
        __doc__ = doc

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

        @property
        def twice(self) -> float:
            return 2 * factor

    return Scaled


def test_code_and_closures_are_state_and_documentation_is_none() -> None:
    assert digest(make_class(2.0)()) == digest(make_class(2.0, "Says something else.")())
    assert digest(make_class(2.0)()) != digest(make_class(3.0)())
    changed = make_class(2.0)
    changed.forward = lambda self, x: x + 2.0  # type: ignore[method-assign]
    assert digest(changed()) != digest(make_class(2.0)())


def make_helper(limit: float) -> type:
    class Helper:
        def clamp(self, x: torch.Tensor) -> torch.Tensor:
            return x.clamp(max=limit)

    return Helper


def test_classes_that_no_walk_enters_and_enumerations_are_described_by_content() -> None:
    def hold(value: Any) -> nn.Module:
        gate = Gate()
        gate.held = value
        return gate

    assert digest(hold(make_helper(2.0))) == digest(hold(make_helper(2.0)))
    assert digest(hold(make_helper(2.0))) != digest(hold(make_helper(3.0)))
    levels = [enum.IntEnum("Level", {"HIGH": value}).HIGH for value in (1, 1, 2)]
    assert digest(hold(levels[0])) == digest(hold(levels[1])) != digest(hold(levels[2]))


def test_what_is_constant_for_one_process_alone_has_no_digest() -> None:
    gate = Gate()
    gate.read = torch.compiler.assume_constant_result(lambda: 1.0)
    with pytest.raises(ValueError, match="constant for one process"):
        digest(gate)


def test_a_constant_of_a_library_is_described_by_what_it_is_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.utils import import_utils

    def hold(function: Any) -> nn.Module:
        gate = Gate()
        gate.read = function
        return gate

    has_package = import_utils.is_bitsandbytes_available
    before = digest(hold(has_package))
    assert digest(hold(has_package)) == before
    has_package.cache_clear()
    monkeypatch.setattr(import_utils, "_is_package_available", lambda *_, **__: (True, "99.0"))
    monkeypatch.setattr(import_utils, "BITSANDBYTES_MIN_VERSION", "0.0")
    try:
        assert digest(hold(has_package)) != before
    finally:
        has_package.cache_clear()
