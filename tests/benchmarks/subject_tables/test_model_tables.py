"""Tables of whole models: the newest file that measured a case counts, a failure keeps its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.subject_tables import model_tables
from benchmarks.subject_tables.model_tables import summarise_models, tabulate_models
from tests.benchmarks.subject_tables.documents import write_document


def make_row(contender: str, us: float, status: str = "ok", gain: float = 1.0) -> dict[str, Any]:
    ratio = {"speedup": gain, "low": gain, "high": gain}
    row = {"model": "lstm", "phase": "train", "contender": contender, "median_us": us}
    row |= {"status": status, "reason": "" if status == "ok" else "time limit", "error_ratio": None}
    return row | {"vs_eager": ratio, "vs_compile": ratio}


def write_rows(folder: Path, name: str, created: str, us: float, status: str = "ok") -> None:
    baselines = [make_row("eager", 90.0), make_row("torch.compile", 80.0)]
    rows = [*baselines, make_row("cudal1.accelerate", us, status, 80.0 / us)]
    write_document(folder / name, rows, created=created)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which one file is listed by name and two by pattern."""
    monkeypatch.setattr(model_tables, "_MODEL_FILES", ("h200-train.json",))
    write_rows(tmp_path, "h200-train.json", "2026-01-01", 60.0)
    write_rows(tmp_path, "h200-models-b.json", "2026-01-02", 50.0)
    write_rows(tmp_path, "h200-models-a.json", "2026-01-03", 40.0)
    return tmp_path


def test_the_newest_file_of_a_case_counts(results: Path) -> None:
    assert summarise_models(results)[2:] == [
        "| lstm, train | 90 | 80 | 40 | 2.000x [2.000, 2.000] |"
    ]


def test_a_newer_failure_does_not_replace_a_measured_row(results: Path) -> None:
    write_rows(results, "h200-models-c.json", "2026-01-04", 1.0, "failed")
    assert summarise_models(results)[2].startswith("| lstm, train | 90 | 80 | 40 |")


def test_every_row_is_a_line_a_failed_one_with_its_reason(results: Path) -> None:
    write_rows(results, "h200-models-c.json", "2026-01-04", 1.0, "failed")
    lines = tabulate_models(results)
    assert sum(line.startswith("| lstm, train |") for line in lines) == 4 * 3
    assert "| lstm, train | cudal1.accelerate | failed | time limit | | |" in lines
