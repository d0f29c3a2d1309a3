"""Results of several processes as Markdown: warm-up workers, and ranks of one model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import load
from benchmarks.subject_tables.table_text import make_heading

__all__ = ["tabulate_fleet"]

_FLEET_FILES = ("h200-fleet.json", "h200-fleet-cold.json", "h200-fleet-one.json")
_RANK_FILES = ("h200-ranks-2.json", "h200-ranks-4.json")


def tabulate_fleet(results: Path) -> list[str]:
    lines: list[str] = []
    for name in _FLEET_FILES:
        lines += ["", *_tabulate_warmup(name, load(results / name))]
    for name in _RANK_FILES:
        lines += ["", *_tabulate_ranks(name, load(results / name))]
    return lines


def _tabulate_warmup(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = [
        *make_heading(name, document),
        "| warm-up workers | tasks | judged | tasks a second | over one worker |",
    ]
    lines.append("|---|---|---|---|---|")
    for row in document["rows"]:
        if row["status"] != "ok":
            lines.append(
                f"| {row['workers']} | {row['tasks']} | {row['judged']} | {row['status']}: {row['reason']} | |"
            )
            continue
        over = document["throughput_over_one"][str(row["workers"])]
        lines.append(
            f"| {row['workers']} | {row['tasks']} | {row['judged']} | {row['tasks_per_s']:.3f} | {over:.2f} |"
        )
    return lines


def _tabulate_ranks(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = [
        *make_heading(name, document),
        "| ranks | model | what all run | regions searched, rank by rank | seconds |",
        "|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        searched = ", ".join(map(str, row["searched"]))
        runs = row["reason"] or ", ".join(
            [*row["runs"], *(digest[:12] for digest in row["digests"])]
        )
        seconds = f"{max(row['seconds']):.1f}" if row["seconds"] else ""
        lines.append(
            f"| {row['devices']}, {row['backend']} | {row['scene']} | {runs} | {searched} | {seconds} |"
        )
    return lines
