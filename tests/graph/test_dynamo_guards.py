"""Dynamo's guards are divided: what the signature or a record implies is dropped, the rest is kept,
and no change of the module goes unseen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.entries import Calls
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.dynamo import DynamoCapture, capture_call
from torch_cudal1.graph.dynamo_guards import GuardSplit
from torch_cudal1.runtime.guard import ModuleGuard
from torch_cudal1.runtime.guard_builder import record_module

pytestmark = pytest.mark.usefixtures("dynamo", "inference")

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def split_guards(module: Calls, *args: Any) -> tuple[GuardSplit, DynamoCapture, Any]:
    records = record_module(module)
    assert not isinstance(records, Refusal)
    captured = capture_call(module, args, {})
    split = GuardSplit(captured, records)
    return split, captured, captured.guards(split.keep)


def test_a_plain_module_needs_none_of_dynamos_guards() -> None:
    module = Calls(lambda m, x: m.linear(x))
    split, captured, _ = split_guards(module, X)
    assert split.kept_guards == []
    passed = [captured.from_arguments(number) for number in range(len(captured.sources))]
    identities = [split.holds_identity(source) for source in captured.sources]
    assert identities == [not argument for argument in passed]


class Options:
    def __init__(self) -> None:
        self.gain = 2.0


def test_an_attribute_behind_the_module_is_compared_by_a_record() -> None:
    module = Calls(lambda m, x: m.linear(x) * m.options.gain)
    module.options = Options()
    split, _, _ = split_guards(module, X)
    guard = ModuleGuard(split.merge_records())
    assert guard.holds()
    module.options.gain = 3.0
    assert not guard.holds()


def test_an_argument_that_no_signature_describes_keeps_its_guard() -> None:
    module = Calls(lambda m, x, options: m.linear(x) * options.gain)
    options = Options()
    split, _, check = split_guards(module, X, options)
    assert any("gain" in name for name in split.kept_guards)
    call = {"module": module, "args": (X, options), "kwargs": {}}
    assert check(call)
    options.gain = 3.0
    assert not check(call)


def test_an_assignment_in_vain_is_compared_while_it_is_in_vain() -> None:
    def forward(m: Calls, x: torch.Tensor) -> torch.Tensor:
        m.options.gain = 2.0
        return m.linear(x)

    module = Calls(forward)
    module.options = Options()
    split, _, _ = split_guards(module, X)
    guard = ModuleGuard(split.merge_records())
    assert guard.holds()
    module.options.gain = 1.0
    assert not guard.holds()
