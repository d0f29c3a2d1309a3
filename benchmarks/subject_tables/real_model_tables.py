"""Results of real models as Markdown: every way of running a model, and this package's against the best
of PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_models.__main__ import geometric_mean
from benchmarks.real_models.columns import COLUMNS
from benchmarks.real_models.zoo import MODELS
from benchmarks.report import load
from benchmarks.subject_tables.table_text import make_heading

__all__ = ["summarise_real_models", "tabulate_real_models"]

_BASELINES = ("eager", "torch.compile", "reduce-overhead")
_UNTUNED = ("accelerate", "backend")
_TUNED = "accelerate-tuned"


def tabulate_real_models(results: Path) -> list[str]:
    """A table for each results file, oldest first."""
    documents = [(path.name, load(path)) for path in results.glob("*-real-*.json")]
    documents.sort(key=lambda item: item[1]["created"])
    return [
        line for name, document in documents for line in _TABULATE[document["kind"]](name, document)
    ]


def summarise_real_models(results: Path) -> list[str]:
    """One line for each model in half precision with one item, untuned: the newest measurement. Then
    the same after a search, and what large batches are in all.
    """
    newest = _find_newest(results, "small")
    if not newest:
        return []
    head = [
        "model, half precision, batch 1, nothing tuned",
        *(f"{name}, ms" for name in _BASELINES),
    ]
    head += [f"{name}, ms | vs the fastest of these" for name in _UNTUNED]
    columns = 1 + len(_BASELINES) + 2 * len(_UNTUNED)
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * columns]
    for row in newest.values():
        cells = [_format_time(row["columns"][name]) for name in _BASELINES]
        cells += [
            f"{_format_time(row['columns'][name])} | {row['against']['speedups'][name]['best']:.2f}x"
            for name in _UNTUNED
        ]
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    means = [
        f"| {geometric_mean([row['against']['speedups'][name]['best'] for row in newest.values()]):.2f}x"
        for name in _UNTUNED
    ]
    lines.append(f"| geometric mean | | | | {' | '.join(means)} |")
    missing = [name for name in MODELS if name not in newest]
    lines += ["", *([f"Not measured yet: {', '.join(missing)}.", ""] if missing else [])]
    lines += _summarise_searches(_find_newest(results, "small", (_TUNED,)))
    return [*lines, *_summarise_large(_find_newest(results, "large"))]


def _summarise_searches(newest: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Models that were searched for, each beside the fastest of PyTorch's ways in its own run."""
    if not newest:
        return []
    speedups = [row["against"]["speedups"][_TUNED]["best"] for row in newest.values()]
    lines = [
        "| model, half precision, batch 1, a minute's search | fastest baseline of its run, ms | accelerate, ms | vs that |",
        "|---|---|---|---|",
    ]
    for (model, row), speedup in zip(newest.items(), speedups, strict=True):
        best, tuned = (row["columns"][name] for name in (row["against"]["best"], _TUNED))
        times = f"{_format_time(best)} ({row['against']['best']}) | {_format_time(tuned)}"
        lines.append(f"| {model} | {times} | {speedup:.2f}x |")
    lines += [f"| geometric mean | | | {geometric_mean(speedups):.2f}x |", ""]
    alone = sum(len(set(_BASELINES) & set(row["columns"])) == 1 for row in newest.values())
    return [*lines, f"In {alone} of {len(newest)} rows that was the only baseline of the run.", ""]


def _summarise_large(newest: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not newest:
        return []
    parts = []
    for name in _UNTUNED:
        speedups = {
            model: row["against"]["speedups"][name]["best"] for model, row in newest.items()
        }
        least = min(speedups, key=lambda model: speedups[model])
        mean = geometric_mean(list(speedups.values()))
        parts.append(f"{name} {mean:.2f}x (the least: {least}, {speedups[least]:.2f}x)")
    count = f"{len(newest)} of {len(MODELS)} models"
    return [f"With large batches ({count}), of the fastest of these: {', '.join(parts)}.", ""]


def _find_newest(
    results: Path, size: str, columns: Sequence[str] = _UNTUNED
) -> dict[str, Mapping[str, Any]]:
    """The newest row of each model of one size in half precision that has these of the package's
    columns.
    """
    newest: dict[str, Mapping[str, Any]] = {}
    for document in sorted(map(load, results.glob("h200-real-*.json")), key=_read_date):
        if document["kind"] == "real_models":
            rows = document["rows"]
            newest |= {row["model"]: row for row in rows if _is_in_half(row, size, columns)}
    return newest


def _read_date(document: Mapping[str, Any]) -> str:
    return str(document["created"])


def _is_in_half(row: Mapping[str, Any], size: str, columns: Sequence[str]) -> bool:
    is_measured = set(columns) <= set(row["against"].get("speedups", {}))
    return is_measured and (row["size"], row["precision"]) == (size, "half")


def _tabulate_columns(name: str, document: Mapping[str, Any]) -> list[str]:
    columns = document["options"]["columns"]
    package_columns = [column for column in columns if column in document["summary"]]
    head = ["model", *(f"{column}, ms" for column in columns)]
    head += [f"{column} vs the best" for column in package_columns]
    searched = [column for column in package_columns if COLUMNS[column].tuned]
    head += [f"{column} ready after, s" for column in searched]
    has_floors = any(_find_floor_us(row) for row in document["rows"])
    head += [
        "floor, ms",
        *(f"{column}: share of the floor" for column in package_columns),
    ] * has_floors
    lines = make_heading(name, document)
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in document["rows"]:
        cells = [_format_time(row["columns"][column]) for column in columns]
        speedups = row["against"].get("speedups", {})
        cells += [
            f"{speedups[column]['best']:.2f}x" if column in speedups else ""
            for column in package_columns
        ]
        cells += [_format_seconds(row["columns"][column]) for column in searched]
        cells += _format_shares(row, package_columns) if has_floors else []
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


def _format_seconds(column: Mapping[str, Any]) -> str:
    return f"{column['first_call_s']:.0f}" if "first_call_s" in column else ""


def _find_floor_us(row: Mapping[str, Any]) -> float:
    """Of a model whose floor was measured; 0.0 else."""
    return float(row["columns"].get("eager", {}).get("floor", {}).get("us", 0.0))


def _format_shares(row: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    floor_us = _find_floor_us(row)
    if not floor_us:
        return [""] * (1 + len(columns))
    times = [row["columns"][column].get("us") for column in columns]
    return [f"{floor_us / 1000:.3f}", *(f"{floor_us / us:.0%}" if us else "" for us in times)]


def _tabulate_blocks(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = make_heading(name, document)
    lines += [
        "| model | blocks | kernels compiled, whole | by blocks | compile, whole, s | by blocks, s "
        "| whole, ms | by blocks, ms | by blocks vs whole |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        if "speedup" not in row:
            lines.append(f"| {row['model']} | {row.get('failed', 'none')} |" + " |" * 7)
            continue
        blocks = ", ".join(
            f"{block['occurrences']} of {block['steps']} steps" for block in row["blocks"]
        )
        whole, parts = row["inductor"], row["regional"]
        lines.append(
            f"| {row['model']} | {blocks} | {whole['compiled_kernels']} | "
            f"{parts['compiled_kernels']} | {whole['compile_s']:.1f} | {parts['compile_s']:.1f} | "
            f"{row['whole_us'] / 1000:.3f} | {row['by_blocks_us'] / 1000:.3f} | "
            f"{row['speedup']['value']:.3f}x |"
        )
    return [*lines, ""]


def _tabulate_depth(name: str, document: Mapping[str, Any]) -> list[str]:
    lines = make_heading(name, document)
    lines += [
        "| Llama of 7-billion width | ready after, s | searches | candidates judged | own forward, ms "
        "| accelerated, ms | runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        if "failed" in row:
            lines.append(f"| {row['model']} | failed: {row['failed']} |" + " |" * 5)
            continue
        counters = row["counters"]
        lines.append(
            f"| {row['model']} | {row['seconds']:.1f} | {counters['regions_tuned']} | "
            f"{counters['candidates_judged']} | {row['own_us'] / 1000:.2f} | "
            f"{row['us'] / 1000:.2f} | {', '.join(row['runs'])} |"
        )
    return [*lines, ""]


def _tabulate_starts(name: str, document: Mapping[str, Any]) -> list[str]:
    ways = list(document["rows"][0]["ways"])
    lines = make_heading(name, document)
    head = ["model", *(f"{way}, cold, s | warm, s" for way in ways)]
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * (1 + 2 * len(ways))]
    for row in document["rows"]:
        cells = [_format_start(facts) for facts in row["ways"].values()]
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    return [*lines, ""]


def _format_start(facts: Mapping[str, Any]) -> str:
    if "cold_s" not in facts:
        return f"failed: {facts['failed']}".replace("|", "/") + " |"
    warm = f"{facts['warm_s']:.2f}" if facts["warm_s"] is not None else "not measured"
    return f"{facts['cold_s']:.1f} | {warm}"


def _tabulate_generation(name: str, document: Mapping[str, Any]) -> list[str]:
    options = document["options"]
    prompt, new = options["prompt"], options["new"]
    lines = make_heading(name, document)
    lines += [
        f"| way, {options['batch']} x {prompt} + {new} tokens | first call, s | tokens/s | tokens as eager's |",
        "|---|---|---|---|",
    ]
    for row in document["rows"]:
        if "failed" in row:
            lines.append(f"| {row['way']} | failed: {row['failed'].replace('|', '/')} | | |")
            continue
        lines.append(
            f"| {row['way']} | {row['first_s']:.1f} | {row['tokens_per_s']:.0f} "
            f"| {row['equal_tokens']} of {options['batch'] * new} |"
        )
    return [*lines, ""]


_TABULATE = {
    "real_models": _tabulate_columns,
    "real_models.blocks": _tabulate_blocks,
    "real_models.depth": _tabulate_depth,
    "real_models.generate": _tabulate_generation,
    "real_models.start": _tabulate_starts,
}
