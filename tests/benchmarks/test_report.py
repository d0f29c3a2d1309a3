"""Results files: what they hold, and that they are whole."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.report import (
    SCHEMA,
    environment,
    format_table,
    load,
    make_document,
    rows_as_json,
    save,
    summarise,
)
from benchmarks.runner import Row, make_failed_row

OURS = "cudal1.accelerate"


def _make_row(model: str, eager: float, compiled: float, contender: str = OURS) -> Row:
    ratios = [
        {"speedup": x, "low": x - 0.01, "high": x + 0.01, "steady": 1.0} for x in (eager, compiled)
    ]
    return Row(
        model,
        "inference",
        contender,
        "ok",
        verified=True,
        error_ratio=1.0,
        median_us=9.0,
        vs_eager=ratios[0],
        vs_compile=ratios[1],
    )


ROWS = [
    _make_row("faster", 2.0, 1.5),
    _make_row("slower_than_compile", 1.4, 0.9),
    _make_row("even", 1.0, 1.2),
    make_failed_row("crashed", "inference", OURS, "time limit of 90 s"),
    Row("bad", "train", OURS, "wrong", reason="output: error"),
    _make_row("another", 9.0, 9.0, "eager"),
]


def test_the_summary_is_against_the_better_baseline() -> None:
    summary = summarise(ROWS, OURS)
    assert (summary["cases"], summary["measured"]) == (5, 3)
    assert summary["geomean"] == pytest.approx(math.prod([1.5, 0.9, 1.0]) ** (1 / 3))
    assert summary["geomean_clamped"] == pytest.approx(1.5 ** (1 / 3))
    assert summary["slower"] == ["slower_than_compile/inference"]
    assert summary["slower_beyond_noise"] == ["slower_than_compile/inference"]
    assert summary["unsteady"] == []
    assert summary["won"] == ["faster/inference"]


def test_failures_and_wrong_answers_are_named_and_enter_no_mean() -> None:
    summary = summarise(ROWS, OURS)
    assert (summary["failed"], summary["wrong"]) == (["crashed/inference"], ["bad/train"])
    assert summarise([ROWS[3]], OURS)["geomean"] is None


def test_noise_is_distinguished_from_a_regression() -> None:
    noisy = {"speedup": 0.9, "low": 0.5, "high": 1.3, "steady": 0.0}
    row = Row("noisy", "train", OURS, "ok", vs_eager=noisy, fallbacks=["judge: timed out"])
    summary = summarise([row], OURS)
    assert (summary["slower"], summary["slower_beyond_noise"]) == (["noisy/train"], [])
    assert summary["unsteady"] == summary["fell_back"] == ["noisy/train"]
    assert "not served: judge: timed out" in format_table([row])


def test_a_document_has_the_environment_before_the_rows_and_survives_json(tmp_path: Path) -> None:
    value = make_document(
        "models",
        {"rounds": 14},
        rows_as_json(ROWS),
        environment=environment(),
        summary=[summarise(ROWS, OURS)],
    )
    save(tmp_path / "out" / "models.json", value)
    read = load(tmp_path / "out" / "models.json")
    assert list(read).index("environment") < list(read).index("rows")
    assert read["schema"] == SCHEMA
    assert read["rows"] == json.loads(json.dumps(rows_as_json(ROWS)))
    assert {
        "gpu",
        "torch",
        "triton",
        "python",
        "cpu",
        "flags",
        "version",
        "package",
        "gpu_state",
    } <= set(read["environment"])


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    save(path, {"schema": SCHEMA})
    with pytest.raises(ValueError, match="JSON compliant"):
        save(path, {"schema": SCHEMA, "speedup": math.nan})
    assert json.loads(path.read_text()) == {"schema": SCHEMA}
    assert [p.name for p in tmp_path.iterdir()] == ["models.json"]


def test_another_schema_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "old.json", {"schema": SCHEMA + 1})
    with pytest.raises(ValueError, match="schema"):
        load(tmp_path / "old.json")


def test_the_table_shows_failures_with_their_reason() -> None:
    text = format_table(ROWS)
    assert len(text.splitlines()) == 1 + len(ROWS)
    assert "failed: time limit of 90 s" in text
    assert "2.000 [1.990, 2.010]" in text


def test_a_results_file_names_the_module_that_was_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = SimpleNamespace(__spec__=SimpleNamespace(name="benchmarks.siege.__main__"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["x", "--kinds", "one call in many", "/a/machine/out.json"])
    assert make_document("siege", {}, [])["command"] == (
        "python -m benchmarks.siege --kinds 'one call in many' out.json"
    )
    main.__spec__ = None
    assert make_document("judge", {}, [])["command"].startswith("python -m benchmarks.bench_judge")
