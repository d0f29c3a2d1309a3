"""Identical sources: what is accepted counts, what is refused fails the row."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import bench_same_source
from tests.benchmarks.evaluators import patch_evaluator
from torch_cudal1.ir.records import Accepted, CheckResult, Rejected, Timing, Verdict

PASSED = Verdict((CheckResult("numerics", True, 1.0, 2.0),))


def make_evaluation(low: float, *, accepted: bool = False, baseline: str = "eager") -> Any:
    timing = Timing(PASSED, baseline, 100.0, 100.0, low, low, low, 14)
    decision = Accepted(timing) if accepted else Rejected("not faster", "timing", {}, timing)
    baselines = SimpleNamespace(medians_us={"eager": 100.0, "inductor": 80.0})
    return SimpleNamespace(
        timing=timing,
        decision=decision,
        verdict=PASSED,
        baselines=baselines,
        elapsed_s={"timing": 1.0},
    )


@pytest.fixture
def evaluator(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return patch_evaluator(monkeypatch, bench_same_source)


def test_what_was_accepted_fails_the_run_and_nothing_is_dropped(
    evaluator: list[Any], tmp_path: Path
) -> None:
    evaluator += [
        make_evaluation(1.0),
        make_evaluation(1.1, accepted=True),
        make_evaluation(0.9),
        make_evaluation(1.0),
        make_evaluation(1.0),
        make_evaluation(1.0),
    ]
    out = tmp_path / "same.json"
    assert (
        bench_same_source.main(
            ["--device", "cpu", "--trials", "3", "--evaluators", "2", "--out", str(out)]
        )
        == 1
    )
    saved = json.loads(out.read_text())
    assert saved["summary"] == {"trials": 6, "accepted": 1, "failed": 0, "passed": False}
    assert saved["rows"][0]["speedups"] == [1.0, 1.1, 0.9]
    assert not evaluator


def test_speed_is_over_eager_whatever_baseline_is_fastest(evaluator: list[Any]) -> None:
    evaluator += [make_evaluation(0.8, baseline="inductor")]
    *_, row = bench_same_source.measure_source(
        bench_same_source.SOURCES[0], bench_same_source.torch.device("cpu"), 1, 1
    )
    assert row["speedups"] == [1.0]


def test_a_run_that_is_cut_short_keeps_the_evaluators_that_ended(evaluator: list[Any]) -> None:
    evaluator += [make_evaluation(1.0), make_evaluation(0.9), make_evaluation(1.1)]
    first, second = bench_same_source.measure_source(
        bench_same_source.SOURCES[0], bench_same_source.torch.device("cpu"), 3, 2
    )
    assert (first["status"], first["reason"], first["trials"]) == ("not done", "2 of 3 trials", 2)
    assert (second["status"], second["trials"]) == ("ok", 3)
    assert bench_same_source._summarise([first])["failed"] == 1


def test_a_refusal_is_a_failed_row(evaluator: list[Any]) -> None:
    refused = SimpleNamespace(
        timing=None, baselines=None, verdict=SimpleNamespace(failure="numerics")
    )
    evaluator += [make_evaluation(1.0), refused]
    *_, row = bench_same_source.measure_source(
        bench_same_source.SOURCES[0], bench_same_source.torch.device("cpu"), 5, 1
    )
    assert (row["status"], row["trials"], row["reason"]) == ("failed", 1, "refused: numerics")
