"""The fleet benchmark counts finished tasks only, and its tasks are ones that `cudal1 warmup`
takes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import bench_fleet
from benchmarks.bench_fleet import WarmupRun, compare_with_goal, main, write_tasks
from benchmarks.report import load
from torch_cudal1.api.targets import load as load_target
from torch_cudal1.graph.captured import capture_regions

ONE = WarmupRun(1, 2, "ok", seconds=10.0, tasks_per_s=0.2, task_seconds=(4.0, 4.0))


@pytest.mark.parametrize(("rate", "reached"), [(0.68, True), (0.67, False)])
def test_the_goal_is_a_ratio_of_throughputs(rate: float, reached: bool) -> None:
    summary = compare_with_goal([WarmupRun(4, 8, "ok", seconds=8 / rate, tasks_per_s=rate), ONE])
    assert summary["throughput_over_one"] == {1: 1.0, 4: pytest.approx(rate / 0.2)}
    assert summary["reached"] == {4: reached}


def test_without_a_run_of_one_worker_nothing_is_claimed() -> None:
    assert compare_with_goal([WarmupRun(4, 8, "ok", seconds=1.0, tasks_per_s=8.0)]) == {}
    assert (
        compare_with_goal(
            [
                WarmupRun(1, 2, "failed", "it broke", seconds=1.0),
                WarmupRun(4, 8, "ok", seconds=1.0, tasks_per_s=8.0),
            ]
        )
        == {}
    )


def test_steady_throughput_leaves_out_the_start() -> None:
    assert ONE.steady_tasks_per_s == 0.25
    assert WarmupRun(1, 2, "failed").steady_tasks_per_s is None


def test_tasks_are_targets_with_a_region_each_and_all_different(tmp_path: Path) -> None:
    keys = set()
    for path in write_tasks(tmp_path / "tasks", 3, rows=4, first_width=16):
        (loaded,) = load_target(str(path), device="cpu")
        with torch.no_grad():
            keys |= {region.key for region in capture_regions(loaded.module, loaded.inputs)}
    assert len(keys) == 3


def test_a_run_that_does_not_fit_and_one_that_fails_are_rows_that_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "fleet.json"
    assert (
        main(["--devices", "cpu", "--counts", "2", "--total-limit-s", "0", "--out", str(out)]) == 1
    )
    assert load(out)["rows"][0]["reason"] == "the total limit was reached"
    monkeypatch.setattr(bench_fleet, "_TASK", "no module\n")
    assert (
        main(["--devices", "cpu", "--counts", "1", "--tasks-per-worker", "1", "--out", str(out)])
        == 1
    )
    (row,) = load(out)["rows"]
    assert (row["status"], row["tasks_per_s"]) == ("failed", None)


@pytest.mark.parametrize(("built", "reason"), [(0, "0 candidates were validated"), (2, "")])
def test_a_run_that_only_timed_baselines_is_a_failed_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: int, reason: str
) -> None:
    """The command is a stand-in that answers at once."""
    answer = json.dumps({"results": [{"error": "", "built": built, "seconds": 1.0}]})
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\necho '{answer}'\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(stand_in))
    out = tmp_path / "fleet.json"
    assert main(
        ["--devices", "cpu", "--counts", "1", "--tasks-per-worker", "1", "--out", str(out)]
    ) == bool(reason)
    (row,) = load(out)["rows"]
    assert row["reason"].startswith(reason)
    assert (row["status"], row["judged"]) == ("failed" if reason else "ok", built)
