"""The benchmark of starts: warm processes find what the cold one left, and a failure is a row."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.real_models import start
from benchmarks.report import load


def run_main(
    out: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[dict[str, Any]]]
) -> tuple[int, list[tuple[str, Path]]]:
    """`main` with processes that give the next of `answers[way]`: its exit code, and which way was
    started in which folder.
    """
    started: list[tuple[str, Path]] = []

    def start_column(model: str, way: str, args: Any, folder: Path) -> Any:
        started.append((way, folder))
        facts = answers[way].pop(0)
        is_ready = "failed" not in facts
        return SimpleNamespace(model=model, column=way, facts=facts, is_ready=is_ready)

    monkeypatch.setattr(start, "start_column", start_column)
    monkeypatch.setattr(start, "await_preparation", lambda runs, limit_s: None)
    monkeypatch.setattr(start, "end", lambda run: None)
    arguments = ["--columns", "torch.compile,accelerate", "--runs", "2", "--device", "cpu"]
    return start.main(["--out", str(out), *arguments]), started


def make_facts(seconds: float) -> dict[str, Any]:
    return {"first_call_s": seconds, "ready_s": seconds, "difference": 0.0, "runs": "inductor"}


def test_warm_processes_take_turns_in_the_folders_of_the_cold_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        "torch.compile": [make_facts(20.0), make_facts(2.0), make_facts(3.0)],
        "accelerate": [make_facts(25.0), make_facts(1.0), {"failed": "no memory"}],
    }
    code, started = run_main(tmp_path / "start.json", monkeypatch, answers)
    assert code == 0
    assert [way for way, _ in started] == ["torch.compile", "accelerate"] * 3
    assert len({folder for _, folder in started}) == 2
    (row,) = load(tmp_path / "start.json")["rows"]
    compiled, accelerated = row["ways"]["torch.compile"], row["ways"]["accelerate"]
    assert (compiled["cold_s"], compiled["warm_s"]) == (20.0, 2.5)
    assert (accelerated["cold_s"], accelerated["warm_s"]) == (25.0, 1.0)
    assert accelerated["warm_runs_s"] == [1.0, "no memory"]


def test_a_cold_process_that_fails_has_no_warm_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        "torch.compile": [make_facts(20.0), make_facts(2.0), make_facts(2.0)],
        "accelerate": [{"failed": "not ready in 240 s"}],
    }
    code, started = run_main(tmp_path / "start.json", monkeypatch, answers)
    assert code == 1
    assert len(started) == 4
    (row,) = load(tmp_path / "start.json")["rows"]
    assert row["ways"]["accelerate"] == {"failed": "not ready in 240 s", "warm_s": None}


def test_a_real_process_answers_sooner_from_a_warm_cache(tmp_path: Path) -> None:
    out = tmp_path / "start.json"
    options = ["--models", "volume-encoder", "--columns", "accelerate", "--precision", "fp32"]
    assert start.main(["--out", str(out), *options, "--device", "cpu", "--runs", "1"]) == 0
    (row,) = load(out)["rows"]
    facts = row["ways"]["accelerate"]
    assert facts["difference"] < 1e-3
    assert facts["warm_s"] > 0
    assert load(out)["command"].startswith("python -m benchmarks.real_models.start")
