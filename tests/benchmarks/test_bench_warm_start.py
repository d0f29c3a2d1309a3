"""The warm-start benchmark: its counters are evidence, its processes are measured from their start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks import bench_warm_start
from benchmarks.bench_warm_start import judge_counters, main
from benchmarks.report import load

# (counters of the cold process, of the warm ones, a word of the complaint or "")
COUNTERS: list[tuple[Mapping[str, int], Sequence[Mapping[str, int]], str]] = [
    ({"candidates_built": 3, "candidates_judged": 2}, [{"hits": 1}, {}], ""),
    ({"candidates_built": 3}, [{"candidates_built": 0, "candidates_judged": 0}], ""),
    ({"candidates_built": 3}, [{}, {"candidates_built": 1}], "candidates_built = 1"),
    ({"candidates_built": 3}, [{"candidates_judged": 2}], "candidates_judged = 2"),
    ({}, [{}], "prove nothing"),
    ({"hits": 1}, [{}], "prove nothing"),
]


@pytest.mark.parametrize(("cold", "warm", "complaint"), COUNTERS)
def test_a_warm_process_must_not_search(cold: Mapping[str, int], warm: Sequence[Mapping[str, int]], complaint: str) -> None:
    found = judge_counters(cold, warm)
    assert complaint in found
    assert bool(found) == bool(complaint)


def test_eager_is_measured_from_process_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_warm_start, "CONTENDERS", ("eager",))
    out = tmp_path / "warm.json"
    code = main(["--models", "lstm", "--sizes", "small", "--device", "cpu", "--runs", "1", "--out", str(out)])
    (row,) = load(out)["rows"]
    assert (code, row["status"], row["verified"]) == (0, "ok", True)
    assert row["warm_s"] == pytest.approx(sum(row["stages_s"].values()))
    assert row["stages_s"]["import"] > 0.1  # torch is imported inside the measured time
    assert row["cold_counters"] == {}


def test_a_process_that_fails_is_a_row_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_warm_start, "CONTENDERS", ("no such contender",))
    out = tmp_path / "warm.json"
    assert main(["--models", "lstm", "--sizes", "small", "--device", "cpu", "--runs", "1", "--out", str(out)]) == 1
    (row,) = load(out)["rows"]
    assert row["status"] == "failed"
    assert "cold process ended with code 1" in row["reason"]


def test_the_total_limit_stops_new_processes(tmp_path: Path) -> None:
    out = tmp_path / "warm.json"
    assert main(["--models", "lstm", "--total-limit-s", "0", "--out", str(out)]) == 1
    assert {row["reason"] for row in load(out)["rows"]} == {"cold process not started: the total limit was reached"}
