"""The tables of the README are the committed results, row for row."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import load
from benchmarks.tables import main, render

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_the_readme_holds_what_was_measured():
    assert main(["--check"]) == 0, "run `python -m benchmarks.tables`"


NAMED_BY = {
    "models": ("model", "contender"),
    "warm_start": ("model", "contender"),
    "overhead": ("name",),
    "repeatability": ("kernel",),
    "cache": ("name",),
    "judge": ("candidate", "form"),
}


def test_no_row_is_left_out():
    text = render(RESULTS)
    for path in RESULTS.glob("*.json"):
        found = load(path)
        assert found["command"] in text
        section = text[text.index(f"`benchmarks/results/{path.name}`") :]
        for row in found["rows"]:
            assert any(all(row[name] in line for name in NAMED_BY[found["kind"]]) for line in section.splitlines())
