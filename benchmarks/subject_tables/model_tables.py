"""Results of whole models and of calls as Markdown: speed against the baselines, process starts,
host time of a call, look-ups in the cache.

`tables` puts them on their pages. Every row of a file is a line, a failed one with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import load
from benchmarks.subject_tables.table_text import format_interval, make_heading

__all__ = ["summarise_models", "tabulate_models", "tabulate_overhead", "tabulate_starts"]

_MODEL_FILES = (
    "h200-inference-and-train.json",
    "h200-train.json",
    "h200-bert-kernels.json",
    "h200-inference-2.json",
)
_NEWER_FILES = "-models-*.json"  # one file for each GPU of a run
_START_FILES = (
    "h200-warm-start.json",
    "h200-warm-start-offline.json",
    "h200-warm-start-offline-2.json",
    "h200-warm-start-offline-earlier.json",
)
_OVERHEAD_FILES = (
    "h200-overhead-graph.json",
    "h200-host-guards.json",
    "h200-overhead-dynamo-after-2.json",
    "h200-overhead-dynamo-after.json",
    "h200-overhead-dynamo-before.json",
    "h200-overhead-3.json",
    "h200-overhead-2.json",
    "h200-overhead.json",
    "h200-overhead-earlier.json",
    "h200-host-overhead.json",
    "cpu-overhead.json",
)
_CACHE_FILES = ("cpu-cache.json",)
_PACKAGE_COLUMN = "cudal1.accelerate"


def tabulate_models(results: Path) -> list[str]:
    return [
        line
        for name in _list_model_files(results, "*")
        for line in _tabulate_models(name, load(results / name))
    ]


def tabulate_starts(results: Path) -> list[str]:
    return [line for name in _START_FILES for line in _tabulate_starts(name, load(results / name))]


def tabulate_overhead(results: Path) -> list[str]:
    lines = [
        line for name in _OVERHEAD_FILES for line in _tabulate_overhead(name, load(results / name))
    ]
    return lines + [
        line for name in _CACHE_FILES for line in _tabulate_cache(name, load(results / name))
    ]


def _list_model_files(results: Path, gpu: str) -> list[str]:
    """The results files of whole models, oldest first."""
    newer = sorted(
        (path.name for path in results.glob(gpu + _NEWER_FILES)),
        key=lambda name: load(results / name)["created"],
    )
    return [*_MODEL_FILES, *newer]


def summarise_models(results: Path) -> list[str]:
    """One line for each model and phase: `accelerate` against the better of eager and
    torch.compile.
    """
    newest: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    for name in _list_model_files(results, "h200"):
        rows = load(results / name)["rows"]
        for case in dict.fromkeys(f"{row['model']}, {row['phase']}" for row in rows):
            of_case = {
                row["contender"]: row for row in rows if f"{row['model']}, {row['phase']}" == case
            }
            if case not in newest or of_case[_PACKAGE_COLUMN]["status"] == "ok":
                newest[case] = of_case
    lines = [
        "| model, phase | eager, µs | torch.compile, µs | accelerate, µs | vs the better |",
        "|---|---|---|---|---|",
    ]
    for case, rows in newest.items():
        times = [rows[name]["median_us"] for name in ("eager", "torch.compile", _PACKAGE_COLUMN)]
        if rows[_PACKAGE_COLUMN]["status"] != "ok":
            lines.append(
                f"| {case} | {times[0]:.0f} | {times[1]:.0f} | {rows[_PACKAGE_COLUMN]['status']} | {rows[_PACKAGE_COLUMN]['reason']} |"
            )
            continue
        against = "vs_compile" if times[1] <= times[0] else "vs_eager"
        cells = " | ".join(f"{time:.0f}" for time in times)
        lines.append(f"| {case} | {cells} | {format_interval(rows[_PACKAGE_COLUMN][against])} |")
    return lines


def _tabulate_models(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = make_heading(name, document)
    lines += [
        "| model, phase | contender | median, µs | vs eager | vs torch.compile | error / eager's |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        case = f"{row['model']}, {row['phase']}"
        if row["status"] != "ok":
            lines.append(f"| {case} | {row['contender']} | {row['status']} | {row['reason']} | | |")
            continue
        ratio = f"{row['error_ratio']:.2f}" if row["error_ratio"] is not None else ""
        lines.append(
            f"| {case} | {row['contender']} | {row['median_us']:.0f} | {format_interval(row['vs_eager'])} "
            f"| {format_interval(row['vs_compile'])} | {ratio} |"
        )
    return [*lines, ""]


def _tabulate_starts(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = make_heading(name, document)
    lines += [
        "| model | contender | cold start, s | warm start, s | searched when warm |",
        "|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        searched = (
            ""
            if "cudal1" not in row["contender"]
            else "nothing"
            if row["status"] == "ok"
            else row["reason"]
        )
        lines.append(
            f"| {row['model']} | {row['contender']} | {row['cold_s']:.1f} | {row['warm_s']:.1f} | {searched} |"
        )
    return [*lines, ""]


def _tabulate_overhead(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = [
        *make_heading(name, document),
        "| host time of a call | median, µs | 10 % to 90 %, µs |",
        "|---|---|---|",
    ]
    for row in document["rows"]:
        if row["reason"]:
            lines.append(f"| {row['name']} | | {row['reason']} |")
            continue
        lines.append(
            f"| {row['name']} | {row['median_us']:.2f} | {row['p10_us']:.2f} to {row['p90_us']:.2f} |"
        )
    return [*lines, ""]


def _tabulate_cache(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = [
        *make_heading(name, document),
        "| cache | median, µs | 10 % to 90 %, µs | limit, µs |",
        "|---|---|---|---|",
    ]
    for row in document["rows"]:
        limit = "" if row["limit_us"] is None else f"{row['limit_us']:.0f}"
        lines.append(
            f"| {row['name']} | {row['median_us']:.0f} | {row['p10_us']:.0f} to {row['p90_us']:.0f} | {limit} |"
        )
    return lines
