"""Results of training as Markdown: what a rate counts, and a line for each operation."""

from __future__ import annotations

from pathlib import Path

from benchmarks.subject_tables.training_tables import tabulate_evaluator, tabulate_landscapes

ROOT = Path(__file__).resolve().parents[3]


def test_a_rate_is_shown_with_what_it_counts() -> None:
    row = {
        "lanes": 8,
        "trust": "own",
        "programs": 90,
        "rate": 9.5,
        "outcomes": {"ok": 60, "wrong": 30},
        "seconds": {"timing": 0.08},
    }
    assert "| 8 | own | 90 | 9.50 | - | ok 60, wrong 30 | timing 0.080 |" in tabulate_evaluator(
        {"rows": [row], "goal": 10.0}
    )
    row["batches"] = [[8, 30.0], [40, 36.0], [42, 40.0]]
    assert "| 8 | own | 90 | 9.50 | 10.50 | ok 60, wrong 30 | timing 0.080 |" in tabulate_evaluator(
        {"rows": [row], "goal": 10.0}
    )


def test_the_landscape_of_the_package_has_a_line_for_each_operation() -> None:
    text = tabulate_landscapes(
        [ROOT / "torch_cudal1" / "training" / "data" / "cpu-landscape.json.gz"]
    )
    assert sum(line.startswith("| ") for line in text) == 1 + 9
    assert any(line.startswith("| avg_pool1d | 3, 1 | 96 |") for line in text)
