"""The page and the tables of an experiment."""

from __future__ import annotations

from tests.training.known_results import PLAN, arms
from torch_cudal1.training.experiments.experiment_report import (
    build_run_sections,
    build_tables,
    render_experiment_page,
)


def test_the_page_says_what_was_compared_and_warns_of_few_seeds():
    results = arms({"A4": 0.0, "A6": 0.2})
    cheats = {"naive": [{"step": 0.0, "cheats": 0.1, "believed": 0.1, "reported": 1.0}] * 3}
    page = render_experiment_page(PLAN, results, {"torch": "2"}, cheats=cheats)
    for expected in (
        "A6 - A4, held-out shape (primary)",
        "A6 is better",
        "4 seeds: intervals over so few",
        "synthetic",
        PLAN.digest,
    ):
        assert expected in page
    assert "intervals over so few" not in render_experiment_page(
        PLAN, arms({"A4": 0.0, "A6": 0.2}, seeds=8), {}
    )


def test_every_row_of_every_table_has_a_cell_for_every_column():
    results = arms({"A0": 0.0, "A4": 0.0, "A6": 0.2})
    sections = build_run_sections(results[0]["curve"], "synthetic")
    tables = [
        *build_tables(PLAN, results),
        *(part for section in sections for part in section.parts if hasattr(part, "rows")),
    ]
    assert len(tables) == 6
    for table in tables:
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_without_results_there_is_a_page_that_says_so():
    assert "no results" in render_experiment_page(PLAN, [], {})
