"""Results of real models as Markdown: every way of running a model, and this package's against the best
of PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import load
from benchmarks.subject_tables.table_text import make_heading

__all__ = ["tabulate_real_models"]


def tabulate_real_models(results: Path) -> list[str]:
    """A table for each results file, oldest first."""
    documents = [(path.name, load(path)) for path in results.glob("*-real-*.json")]
    documents.sort(key=lambda item: item[1]["created"])
    return [line for name, document in documents for line in _tabulate(name, document)]


def _tabulate(name: str, document: Mapping[str, Any]) -> list[str]:
    columns = document["options"]["columns"]
    package_columns = [column for column in columns if column in document["summary"]]
    head = ["model", *(f"{column}, ms" for column in columns)]
    head += [f"{column} vs the best" for column in package_columns]
    lines = make_heading(name, document)
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in document["rows"]:
        cells = [_format_time(row["columns"][column]) for column in columns]
        speedups = row["against"].get("speedups", {})
        cells += [
            f"{speedups[column]['best']:.2f}x" if column in speedups else ""
            for column in package_columns
        ]
        lines.append(
            f"| {row['model']} ({row['size']}, {row['precision']}) | {' | '.join(cells)} |"
        )
    means = ", ".join(
        f"{column} {document['summary'][column]['geomean_vs_best']:.2f}x"
        for column in package_columns
    )
    return [*lines, "", f"Geometric means over all rows, a failure counting as 1.0: {means}.", ""]


def _format_time(column: Mapping[str, Any]) -> str:
    if "us" in column:
        return f"{column['us'] / 1000:.3f}"
    return f"failed: {column.get('failed', 'no time')}".replace("|", "/")
