"""Every step by which a guard reads its value is recorded; a step that no record compares is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.source import (
    AttrSource,
    DefaultsSource,
    DictGetItemSource,
    GetItemSource,
    GlobalSource,
    LocalSource,
    TypeSource,
)

from tests.entries import Calls
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.dynamo import capture_call
from torch_cudal1.graph.dynamo_guard_records import RecordCollector, UnprovenError
from torch_cudal1.graph.dynamo_guard_sources import SourceReader, find_root_source, steps_of
from torch_cudal1.runtime.guard import ModuleGuard
from torch_cudal1.runtime.guard_builder import record_module

pytestmark = pytest.mark.usefixtures("dynamo", "inference")

MODULE = LocalSource("module")


class Scaled(Calls):
    """Attributes of every kind beside the layer."""

    bias = 1.5

    def __init__(self) -> None:
        super().__init__(lambda m, x: m.linear(x) * m.gains["first"])
        self.gains = {"first": 2.0}
        self.sizes = [1, 2, 3]

    @property
    def current_gain(self) -> float:
        return self.gains["first"]

    def scale(self, x: Any, by: int = 4) -> Any:
        return x * by


@pytest.fixture
def scaled_module() -> tuple[Scaled, SourceReader, RecordCollector]:
    module = Scaled()
    records = record_module(module)
    assert not isinstance(records, Refusal)
    collector = RecordCollector(records)
    captured = capture_call(module, (torch.randn(2, 8),), {})
    return module, SourceReader(captured, collector), collector


def test_values_are_read_as_the_frame_reads_them(scaled_module: Any) -> None:
    module, reader, _ = scaled_module
    scale = AttrSource(MODULE, "scale")
    assert reader.read(MODULE) is module
    assert reader.read(AttrSource(AttrSource(MODULE, "linear"), "weight")) is module.linear.weight
    assert reader.read(DictGetItemSource(AttrSource(MODULE, "gains"), "first")) == 2.0
    assert reader.read(GetItemSource(AttrSource(MODULE, "sizes"), 1)) == 2
    assert reader.read(AttrSource(MODULE, "bias")) == 1.5
    assert reader.read(TypeSource(MODULE)) is Scaled
    assert reader.read(scale).__func__ is Scaled.scale
    assert reader.read(DefaultsSource(AttrSource(scale, "__func__"), 0)) == 4


def test_what_was_read_is_compared_from_then_on(scaled_module: Any) -> None:
    module, reader, collector = scaled_module
    reader.read(DictGetItemSource(AttrSource(MODULE, "gains"), "first"))
    reader.read(AttrSource(MODULE, "bias"))
    guard = ModuleGuard(collector.merge())
    assert guard.holds()
    module.bias = 3.0  # an attribute of the instance comes before that of the class
    assert not guard.holds()
    del module.bias
    assert guard.holds()
    module.gains["first"] = 5.0
    assert not guard.holds()


@pytest.mark.parametrize(
    "source",
    [
        LocalSource("args"),
        GetItemSource(LocalSource("args"), 0),
        GlobalSource("no_such_name"),
        AttrSource(MODULE, "current_gain"),
        AttrSource(MODULE, "no_such_attribute"),
        AttrSource(GetItemSource(AttrSource(MODULE, "sizes"), 0), "real"),
    ],
    ids=["arguments", "an argument", "a global", "a property", "absent", "of a C object"],
)
def test_a_step_that_no_record_compares_proves_nothing(source: Any, scaled_module: Any) -> None:
    _, reader, _ = scaled_module
    for _ in range(2):  # a second guard with the same step must not be believed either
        with pytest.raises(UnprovenError):
            reader.read(source)


def test_a_source_is_a_root_and_its_steps() -> None:
    gains = AttrSource(MODULE, "gains")
    first = DictGetItemSource(gains, "first")
    assert find_root_source(first) is MODULE
    assert list(steps_of(first)) == [first, gains]
    assert list(steps_of(MODULE)) == []
    assert isinstance(nn.Linear(1, 1), nn.Module)
