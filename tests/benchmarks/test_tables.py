"""The tables of the README are the committed results, row for row."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import load
from benchmarks.tables import main, render

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_the_readme_holds_what_was_measured():
    assert main(["--check"]) == 0, "run `python -m benchmarks.tables`"


def test_no_row_is_left_out():
    text = render(RESULTS)
    for path in RESULTS.glob("*.json"):
        found = load(path)
        assert found["command"] in text
        for row in found["rows"]:
            assert any(row["model"] in line and row["contender"] in line for line in text.splitlines())
