"""A start on a warm cache traces nothing, and a record that is wrong changes no answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import cudal1
from tests.api.test_quick_tier import always_compile
from torch_cudal1.api import binding
from torch_cudal1.api.signatures.recalled_call import CachedCall
from torch_cudal1.api.signatures.recalled_capture import CaptureRecord
from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.module_call import capture_module_call
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.context import make_context

CPU = torch.device("cpu")
X, Y = torch.randn(3, 4), torch.randn(3, 4)


class Difference(nn.Module):
    """Not the same when its arguments change places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"result": torch.tanh(self.linear(x)) - 2 * y}


@pytest.fixture(autouse=True)
def compile_without_gradients(dynamo: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    always_compile(monkeypatch)
    # A recalled call asks for no capture.
    monkeypatch.setattr(CachedCall, "recall", lambda _: Refusal("captured here"))
    with torch.no_grad():
        yield


def start_process(module: nn.Module, folder: Path, on_miss: str = "quick") -> Any:
    """The module as a new process would bind it: with what lies on the disk."""
    torch._dynamo.reset()
    telemetry.reset()
    return cudal1.accelerate(module.eval(), on_miss=on_miss, cache_dir=folder, strictness="error")


def check_call(module: nn.Module) -> None:
    expected = module._call_impl(X, Y)["result"]
    for _ in range(3):
        torch.testing.assert_close(module(X, Y)["result"], expected)


def list_recalls() -> list[str]:
    """What was wrong with each recalled capture; "" where nothing was."""
    events = telemetry.report().events
    return [event.facts["wrong"] for event in events if event.what == "recalled"]


def forbid_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(captured: Any) -> Any:
        raise AssertionError("the call is traced")

    monkeypatch.setattr(binding, "trace_call", refuse)


@pytest.mark.parametrize("on_miss", ["quick", "baseline", "error"])
def test_the_next_process_traces_nothing(
    on_miss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start_process(Difference(), tmp_path)
    check_call(first)
    assert list_recalls() == []
    forbid_traces(monkeypatch)
    again = start_process(Difference(), tmp_path, on_miss)
    check_call(again)
    assert list_recalls() == [""]
    (region,) = cudal1.explain(again).regions
    assert (region.runs, region.name) == ("inductor", "Difference.inference")
    # The C++ table, where there is one, serves it as it serves a traced one.
    table = again._compiled_call_impl._table
    assert table is None or table.counts()


def change_records(folder: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the records of captures in `folder` say something else."""
    find = LocalCache.get_decision_record

    def find_changed(self: LocalCache, *args: Any, **kwargs: Any) -> Any:
        record = find(self, *args, **kwargs)
        is_capture = isinstance(record, dict) and "origins" in record
        return {**record, **change} if is_capture else record

    monkeypatch.setattr(LocalCache, "get_decision_record", find_changed)


@pytest.mark.parametrize(
    ("change", "recalls"),
    [
        # x and y have one form, so nothing but their values tells them apart.
        ({"origins": [2, 1, 3, 0]}, 1),
        ({"origins": "damaged"}, 0),
        ({"order": [0, 1, 2, 99]}, 0),
        ({"order": [0]}, 0),
        ({"region": "0" * 64}, 0),
        ({"static": None}, 0),
    ],
)
def test_a_wrong_record_is_noticed_and_the_call_is_traced(
    change: dict[str, Any], recalls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_call(start_process(Difference(), tmp_path))
    change_records(tmp_path, change, monkeypatch)
    again = start_process(Difference(), tmp_path)
    check_call(again)
    assert len(list_recalls()) == recalls
    assert all(list_recalls())
    assert cudal1.explain(again).regions[0].runs == "inductor"


def test_what_a_trace_depends_on_is_in_the_name_of_the_record(tmp_path: Path) -> None:
    context = make_context(CPU, Settings(cache_dir=tmp_path))
    module = Difference().eval()

    def find_name(*args: torch.Tensor) -> str:
        torch._dynamo.reset()
        captured = capture_module_call(module, args, {})
        name = CaptureRecord(captured.graph, captured.inputs, context)._name
        assert not isinstance(name, Refusal)
        return name

    names = [find_name(X, Y), find_name(X.double().float(), Y), find_name(X[:2], Y[:2])]
    assert names[0] == names[1]
    with torch.autocast("cpu", torch.bfloat16):
        names.append(find_name(X, Y))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        names.append(find_name(X, Y))
    assert len(set(names)) == 4


def test_a_subclass_with_the_form_of_a_plain_weight_is_traced(tmp_path: Path) -> None:
    context = make_context(CPU, Settings(cache_dir=tmp_path))
    module = Difference().eval()
    captured = capture_module_call(module, (X, Y), {})
    assert isinstance(CaptureRecord(captured.graph, captured.inputs, context)._name, str)
    wrapped = TwoTensor(X.clone(), X.clone())
    assert wrapped.shape == X.shape
    for inputs in ((wrapped, *captured.inputs[1:]), (X.as_subclass(Tagged), *captured.inputs[1:])):
        name = CaptureRecord(captured.graph, inputs, context)._name
        assert isinstance(name, Refusal)
        assert "subclass" in name.reason


class Tagged(torch.Tensor):
    """A tensor with a class of its own."""


class Writer(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"result": torch.tanh(x.add_(0)) - 2 * y}


class Viewer(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"result": (torch.tanh(x) - 2 * y), "view": x[0]}


class Sampler(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"result": torch.tanh(x) - 2 * y, "noise": torch.rand_like(x)}


@pytest.mark.parametrize("kind", [Writer, Viewer, Sampler])
def test_a_call_that_does_more_is_traced_in_every_process(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    for _ in range(2):
        check_call(start_process(kind(), tmp_path))
        assert list_recalls() == []
