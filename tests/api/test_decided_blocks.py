"""What a search left of one model's blocks serves another model with the same blocks, untuned: another
depth, another head.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cudal1
from tests.api.scripted_trial import make_summary
from tests.entries import Change, add_one_to_output, entry_for, same
from tests.ir.stacks import ROWS, WIDTH, capture_region, make_stack
from torch_cudal1.api.graphs import open_decisions, quick_decision
from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import BY_BLOCKS, Candidate
from torch_cudal1.ir.schedule import REGIONAL
from torch_cudal1.search.by_blocks import find_blocks_to_tune, list_block_regions
from torch_cudal1.search.tune import compose_known_blocks
from torch_cudal1.store.context import make_context

pytestmark = pytest.mark.usefixtures("dynamo")
X = torch.randn(ROWS, WIDTH)


class WithHead(nn.Module):
    """A stack of the layers that were tuned, deeper and with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_stack(16)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.sigmoid(self.head(self.layers(x)))
        return result


@pytest.fixture(autouse=True)
def make_small_models_deep(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("torch_cudal1.search.by_blocks.MIN_COPIED_STEPS", 10)
    with torch.no_grad():
        yield


def plant_blocks(folder: Path, change: Change = same, origin: str = "rewrites") -> None:
    """As a search for a stack of 12 layers would leave its blocks."""
    settings = Settings(cache_dir=folder)
    place = make_context(torch.device("cpu"), settings)
    region = capture_region(make_stack(12), X)
    partition = find_blocks_to_tune(region)
    assert partition is not None
    for block, _ in list_block_regions(region, partition):
        names = () if origin == "baseline" else ("planted",)
        candidate = Candidate(change(block.program), "eager", origin, names)
        place.cache.put(entry_for(block, candidate, settings))


def compose(folder: Path) -> Any:
    place = make_context(torch.device("cpu"), Settings(cache_dir=folder))
    return compose_known_blocks(capture_region(WithHead().eval(), X), place)


def test_a_whole_is_composed_of_blocks_of_another_model(tmp_path: Path) -> None:
    plant_blocks(tmp_path)
    choice = compose(tmp_path)
    assert (choice.candidate.origin, choice.candidate.techniques) == ("blocks", ("planted",))
    assert choice.entry.evidence["tier"] == BY_BLOCKS
    (block,) = choice.entry.evidence["blocks"]
    assert block["occurrences"] > 12


def test_what_is_not_known_or_no_better_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = compose(tmp_path)
    assert isinstance(refusal, Refusal)
    assert refusal.reason.endswith("/block0: no cached decision")
    plant_blocks(tmp_path, origin="baseline")
    refusal = compose(tmp_path)
    assert isinstance(refusal, Refusal)
    assert "nothing beats PyTorch's own ways" in refusal.reason
    monkeypatch.setattr("torch_cudal1.search.by_blocks.MIN_COPIED_STEPS", 10_000)
    refusal = compose(tmp_path)
    assert isinstance(refusal, Refusal)
    assert "not decided by its blocks" in refusal.reason


def script_speedup(speedup: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every contender's measured speed-up over the one before."""
    monkeypatch.setattr(
        open_decisions,
        "end_to_end_benchmark",
        lambda *_, **__: make_summary(speedup, speedup, speedup),
    )


def run_untuned(door: str, folder: Path) -> list[Any]:
    """The events of a process in which the deeper model is called, right every time."""
    torch._dynamo.reset()
    telemetry.reset()
    module = WithHead().eval()
    options: dict[str, Any] = {"cache_dir": folder, "on_miss": "quick", "strictness": "error"}
    call: Any = (
        torch.compile(module, backend="cudal1", options=options)
        if door == "backend"
        else cudal1.accelerate(module, **options)
    )
    for _ in range(3):
        torch.testing.assert_close(call(X), module._call_impl(X), atol=1e-5, rtol=1e-5)
    return list(telemetry.report().events)


def read_stored_origin(folder: Path) -> str:
    """Of what the cache says of the whole."""
    place = make_context(torch.device("cpu"), Settings(cache_dir=folder))
    key = capture_region(WithHead().eval(), X).key
    hit = place.cache.get(key, place.target, place.contract)
    assert not isinstance(hit, Refusal)
    return hit.entry.choice.origin


@pytest.fixture(params=["accelerate", "backend"])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a CPU the backend has no CUDA graph that replays blocks; here it goes on without."""
    monkeypatch.setattr(quick_decision.QuickDecision, "_find_program_schedule", lambda _: REGIONAL)
    return str(request.param)


def test_decided_blocks_run_where_they_are_faster_and_are_stored(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_blocks(tmp_path)
    script_speedup(2.0, monkeypatch)
    events = run_untuned(door, tmp_path)
    contenders = [event.facts["contender"] for event in events if event.what == "quick"]
    assert contenders[-1] == "decided blocks"
    assert read_stored_origin(tmp_path) == "blocks"
    # The next process finds the whole, and measures nothing.
    events = run_untuned(door, tmp_path)
    assert [event for event in events if event.what == "quick"] == []
    assert read_stored_origin(tmp_path) == "blocks"


def test_decided_blocks_that_are_slower_do_not_run(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_blocks(tmp_path)

    def benchmark(*_: Any, **__: Any) -> Any:
        speedup = next(speedups)
        return make_summary(speedup, speedup, speedup)

    speedups = iter((2.0, 0.5) if door == "accelerate" else (0.5, 0.5))
    monkeypatch.setattr(open_decisions, "end_to_end_benchmark", benchmark)
    run_untuned(door, tmp_path)
    assert next(speedups, None) is None
    assert read_stored_origin(tmp_path) == "baseline"


def test_decided_blocks_that_compute_something_else_do_not_run(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_blocks(tmp_path, add_one_to_output)
    script_speedup(2.0, monkeypatch)
    events = run_untuned(door, tmp_path)
    assert "decided blocks" not in [
        event.facts["contender"] for event in events if "over" in event.facts
    ]
    assert read_stored_origin(tmp_path) == "baseline"
