"""A graph of torch.compile whose blocks repeat is compiled block by block, and the next process
neither measures nor traces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.api.scripted_trial import make_summary
from tests.api.test_quick_tier_gpu import Deep
from tests.ir.stacks import ROWS, WIDTH
from tests.runtime.test_runner import PRODUCT
from torch_cudal1.api.graphs import open_decisions, quick_decision
from torch_cudal1.api.signatures.recalled_capture import CaptureRecord
from torch_cudal1.core import telemetry
from torch_cudal1.ir.schedule import INDUCTOR, INDUCTOR_GRAPH, REGIONAL, Schedule
from torch_cudal1.runtime import split_last_kernel

pytestmark = pytest.mark.usefixtures("dynamo")
X = torch.randn(ROWS, WIDTH)
FIND_SCHEDULE = quick_decision.QuickDecision._find_program_schedule


@pytest.fixture(autouse=True)
def compile_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, but for the CUDA graph around the blocks."""
    monkeypatch.setattr(quick_decision.QuickDecision, "_find_program_schedule", lambda _: REGIONAL)
    monkeypatch.setattr("torch_cudal1.search.quick.MIN_COPIED_STEPS", 10)
    with torch.no_grad():
        yield


def script_speedup(speedup: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What eager's measured speed-up over the blocks will be, in every benchmark."""
    monkeypatch.setattr(
        open_decisions,
        "end_to_end_benchmark",
        lambda *_, **__: make_summary(speedup, speedup, speedup),
    )


def forbid(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("done again")

    for name in names:
        monkeypatch.setattr(name, refuse)


def run_in_new_process(module: nn.Module, folder: Path) -> list[Any]:
    """The events of a process that compiles `module` and calls it, right every time."""
    torch._dynamo.reset()
    telemetry.reset()
    options = {"on_miss": "quick", "cache_dir": folder, "strictness": "error"}
    call = torch.compile(module, backend="cudal1", options=options)
    for _ in range(3):
        torch.testing.assert_close(call(X), module(X), atol=1e-5, rtol=1e-5)
    return telemetry.report().events


def test_blocks_are_compiled_once_and_the_next_process_traces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_speedup(0.5, monkeypatch)
    module = Deep().eval()
    events = run_in_new_process(module, tmp_path)
    (compiled,) = [event.facts for event in events if event.what == "by_blocks"]
    assert compiled["compiled"] < compiled["segments"]
    forbid(
        monkeypatch,
        "torch_cudal1.graph.capture.trace",
        "torch_cudal1.api.graphs.quick_decision.choose_graph_call",
    )
    again = run_in_new_process(module, tmp_path)
    assert [event.facts["wrong"] for event in again if event.what == "recalled"] == [""]
    assert [event for event in again if event.what == "by_blocks"]


def test_eager_runs_where_it_is_faster_than_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_speedup(2.0, monkeypatch)
    module = Deep().eval()
    run_in_new_process(module, tmp_path)
    forbid(monkeypatch, "torch_cudal1.runtime.runner.compile_by_blocks")
    run_in_new_process(module, tmp_path)
    assert telemetry.report().counters["graphs_remembered"] == 1


def test_where_the_blocks_do_not_compile_inductor_gets_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a part of it does not compile")

    script_speedup(0.5, monkeypatch)
    monkeypatch.setattr("torch_cudal1.runtime.runner.compile_by_blocks", fail)
    events = run_in_new_process(Deep().eval(), tmp_path)
    failed = [event.facts["failed"] for event in events if "failed" in event.facts]
    assert failed == ["RuntimeError: a part of it does not compile"]
    assert [event.facts["over"] for event in events if "over" in event.facts] == ["inductor"]


def test_a_record_of_another_graph_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_speedup(0.5, monkeypatch)
    module = Deep().eval()
    run_in_new_process(module, tmp_path)
    find = CaptureRecord.recall

    def recall_wrongly(self: Any, name: str) -> Any:
        recalled = find(self, name)
        # Two weights of one form change places.
        first, second, *more = recalled.graph.origins
        object.__setattr__(recalled.graph, "origins", (second, first, *more))
        return recalled

    monkeypatch.setattr(CaptureRecord, "recall", recall_wrongly)
    events = run_in_new_process(module, tmp_path)
    assert all(event.facts["wrong"] for event in events if event.what == "recalled")


@pytest.mark.parametrize(
    ("schedules", "min_bytes", "changes", "expected"),
    [
        ([REGIONAL, Schedule("regional", True)], 1 << 20, {}, Schedule("regional", True)),
        ([INDUCTOR, INDUCTOR_GRAPH], 1, {}, INDUCTOR_GRAPH),
        # A small result costs nothing to copy: Dynamo's own graph is compiled.
        ([INDUCTOR, INDUCTOR_GRAPH], 1 << 20, {}, None),
        ([INDUCTOR], 1, {}, None),
        ([INDUCTOR, INDUCTOR_GRAPH], 1, {"options": {"max_autotune": True}}, None),
        ([INDUCTOR, INDUCTOR_GRAPH], 1, {"can_be_graphed": lambda: False}, None),
    ],
)
def test_a_program_is_compiled_where_blocks_repeat_or_results_are_large(
    schedules: list[Schedule],
    min_bytes: int,
    changes: dict[str, Any],
    expected: Schedule | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quick_decision, "list_quick_schedules", lambda *_: schedules)
    monkeypatch.setattr(split_last_kernel, "MIN_SPLIT_BYTES", min_bytes)
    settings = {"options": {}, "can_be_graphed": lambda: True, "context": None, **changes}
    graphs: Any = [SimpleNamespace(region=SimpleNamespace(program=PRODUCT))]
    traced: Any = SimpleNamespace(direct=True, is_pure=True)
    request: Any = SimpleNamespace(**settings)
    record: Any = None
    decision = quick_decision.QuickDecision(request, traced, graphs, record)
    assert FIND_SCHEDULE(decision) == expected
