"""What a busy machine leaves open is decided for one process, and measured again by the next ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.api.scripted_trial import make_summary
from torch_cudal1.api.graphs import open_decisions
from torch_cudal1.api.graphs.open_decisions import (
    MAX_OPEN_DECISIONS,
    MEASURED_AGAIN,
    OpenCount,
    benchmark_quickly,
)
from torch_cudal1.core import telemetry
from torch_cudal1.core.machine_load import LoadSample
from torch_cudal1.core.settings import Settings
from torch_cudal1.store.context import make_context

CPU, X = torch.device("cpu"), torch.randn(2, 4)
NAME = "ab" * 32
LIKE_NOISE = make_summary(0.7, 1.1, 1.9, steady=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + 1


def script(monkeypatch: pytest.MonkeyPatch, summary: Any, *, others: float) -> list[Any]:
    """Every benchmark ends so, while others use that share of the machine; the benchmarks made."""
    clock, benchmarks = [0.0], []

    def sample() -> LoadSample:
        clock[0] += 10.0
        return LoadSample(busy_s=others * clock[0], command_s=0.0, total_s=clock[0])

    def benchmark(*_: Any, **options: Any) -> Any:
        benchmarks.append(options)
        return summary

    monkeypatch.setattr(open_decisions, "sample_load", sample)
    monkeypatch.setattr(open_decisions, "end_to_end_benchmark", benchmark)
    return benchmarks


@pytest.mark.parametrize(
    ("summary", "others", "is_open"),
    [
        (LIKE_NOISE, 0.5, True),
        (LIKE_NOISE, 0.1, False),  # alone on the machine: such are the calls
        (make_summary(0.7, 1.1, 1.9), 0.5, False),  # the buckets agree
        (make_summary(1.2, 1.5, 1.9, steady=False), 0.5, False),  # faster in every bucket
        (make_summary(0.2, 0.5, 0.9, steady=False), 0.5, False),
    ],
)
def test_what_disagrees_on_a_busy_machine_is_open(
    summary: Any, others: float, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, summary, others=others)
    assert benchmark_quickly(lambda: 0, lambda: 0, CPU, 1.02) == (summary, is_open)


def test_a_machine_without_counters_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, LIKE_NOISE, others=1.0)
    monkeypatch.setattr(open_decisions, "sample_load", lambda: None)
    assert not benchmark_quickly(lambda: 0, lambda: 0, CPU, 1.02)[1]


def test_processes_in_a_row_are_counted_up_to_a_limit(tmp_path: Path) -> None:
    context = make_context(CPU, Settings(cache_dir=tmp_path))
    for process in range(MAX_OPEN_DECISIONS):
        count = OpenCount.read(NAME, context)
        assert (count.processes, count.may_grow) == (process, True)
        count.grow()
    assert not OpenCount.read(NAME, context).may_grow
    unwilling = make_context(CPU, Settings(cache_dir=tmp_path / "other", remeasure=False))
    assert not OpenCount.read(NAME, unwilling).may_grow


@pytest.mark.parametrize("value", ["three", None, [3]])
def test_a_count_that_is_none_counts_nothing(tmp_path: Path, value: object) -> None:
    context = make_context(CPU, Settings(cache_dir=tmp_path))
    record = {"open_decisions": value}
    context.cache.put_decision_record(NAME, record, context.target, context.contract)
    assert OpenCount.read(NAME, context).processes == 0


def start(door: str, folder: Path, **settings: Any) -> str:
    """A new process as far as it knows: calls through `door` are right, and what `explain` notes."""
    torch._dynamo.reset()
    telemetry.reset()
    net = Net().eval()
    options: Any = {"on_miss": "quick", "cache_dir": folder, "strictness": "error", **settings}
    if door == "backend":
        call = torch.compile(net, backend="cudal1", options=options)
        torch.testing.assert_close(call(X), net(X))
        return ""
    from torch_cudal1.api.accelerate import accelerate, explain

    expected = net(X)
    accelerate(net, X, **options)
    torch.testing.assert_close(net(X), expected)
    return str(explain(net))


@pytest.mark.parametrize("door", ["accelerate", "backend"])
def test_later_processes_measure_again_until_one_measures_in_peace(
    door: str, inference: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        benchmarks = script(monkeypatch, LIKE_NOISE, others=0.5)
        note = start(door, tmp_path, remeasure=True)
        assert benchmarks
        assert door == "backend" or MEASURED_AGAIN in note
    benchmarks = script(monkeypatch, make_summary(1.5, 1.5, 1.5), others=0.5)
    assert MEASURED_AGAIN not in start(door, tmp_path, remeasure=True)
    assert benchmarks
    benchmarks = script(monkeypatch, LIKE_NOISE, others=0.5)
    start(door, tmp_path, remeasure=True)
    assert not benchmarks


@pytest.mark.parametrize("door", ["accelerate", "backend"])
def test_a_machine_that_is_never_idle_is_asked_so_many_times(
    door: str, inference: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    for _ in range(MAX_OPEN_DECISIONS + 3):
        benchmarks = script(monkeypatch, LIKE_NOISE, others=0.5)
        start(door, tmp_path, remeasure=True)
        measured.append(bool(benchmarks))
    assert measured == [True] * (MAX_OPEN_DECISIONS + 1) + [False] * 2
    benchmarks = script(monkeypatch, LIKE_NOISE, others=0.5)
    start(door, tmp_path / "other", remeasure=False)
    assert benchmarks
    benchmarks = script(monkeypatch, LIKE_NOISE, others=0.5)
    start(door, tmp_path / "other", remeasure=False)
    assert not benchmarks
