"""Times real models under every column: `python -m benchmarks.real_models --out real-models.json`.

Each column of each model is prepared in a process of its own, several side by side. When all
columns of a batch of models are prepared, nothing else runs, and each is timed alone, in turns with
the other columns of its model; with `--profile` then its kernels are listed. With `--gpus` models
are spread over the GPUs of a machine, all columns of one on the same. A column that fails, or is
not ready in time, counts as eager: 1.0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import report
from benchmarks.bench_models import comma_list_of
from benchmarks.real_models.column_run import (
    ColumnRun,
    await_preparation,
    describe,
    end,
    sample,
    start_column,
)
from benchmarks.real_models.columns import BASELINES, COLUMNS, OURS
from benchmarks.real_models.zoo import MODELS
from benchmarks.ship import ShippingError, ship

__all__ = ["compare_with_baselines", "geometric_mean", "keep_entries", "main"]

ROUNDS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and write its results. Exit code 1 if nothing was measured."""
    args = _parser().parse_args(argv)
    columns, rows = args.columns, []
    batch_size = max(1, args.workers // len(columns))
    for begin in range(0, len(args.models), batch_size):
        batch = args.models[begin : begin + batch_size]
        with tempfile.TemporaryDirectory(prefix="real-models-") as scratch:
            runs = _measure_batch(batch, args, Path(scratch))
            if args.entries is not None:
                keep_entries(Path(scratch), args.entries)
        for model in batch:
            rows.append(_make_row(model, args, [run for run in runs if run.model == model]))
            print(_describe_row(rows[-1]), flush=True)
        # After every batch: what was measured is kept if a later one breaks.
        report.save(args.out, _make_document(args, rows))
    print(json.dumps(_summarise(rows)))
    return 0 if rows else 1


def keep_entries(scratch: Path, into: Path) -> int:
    """Copy what searches of columns found, from the caches below `scratch` into one cache folder that
    `benchmarks.ship` takes; how many entries that are.
    """
    caches = sorted(path.parent for path in scratch.glob("*/cache/v1"))
    try:
        count = ship(caches, into)[0]
    except ShippingError as error:
        print(f"entries were not kept: {error}", file=sys.stderr)
        return 0
    return count


def _measure_batch(
    models: Sequence[str], args: argparse.Namespace, scratch: Path
) -> list[ColumnRun]:
    # All columns of a model on one GPU: two of one kind are not equally fast.
    runs = [
        start_column(
            model,
            column,
            args,
            scratch / f"{model}.{column}",
            number % args.gpus if args.gpus > 1 else None,
        )
        for number, model in enumerate(models)
        for column in args.columns
    ]
    try:
        await_preparation(runs, args.limit_s)
        for model in models:
            contenders = [run for run in runs if run.model == model and run.is_ready]
            for _ in range(ROUNDS):
                for run in contenders:
                    sample(run)
            if args.profile:
                for run in contenders:
                    describe(run, "profile")
                    if run.column == "eager":
                        describe(run, "floor")
    finally:
        for run in runs:
            end(run)
    return runs


def _make_row(model: str, args: argparse.Namespace, runs: Sequence[ColumnRun]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for run in runs:
        column = dict(run.facts)
        if run.is_ready and run.rounds:
            medians = [median(samples) for samples in run.rounds]
            column |= {"us": median(medians), "low_us": min(medians), "high_us": max(medians)}
        columns[run.column] = column
    row = {
        "model": model,
        "library": MODELS[model].library,
        "size": args.size,
        "precision": args.precision,
        "columns": columns,
    }
    return {**row, "against": compare_with_baselines(columns)}


def compare_with_baselines(columns: dict[str, Any]) -> dict[str, Any]:
    """The fastest baseline, and each of this package's columns' speed-up over it and over
    torch.compile. A column without a time counts as 1.0.
    """
    times = {name: column["us"] for name, column in columns.items() if "us" in column}
    baselines = {name: times[name] for name in BASELINES if name in times}
    if not baselines:
        return {}
    best = min(baselines, key=baselines.__getitem__)
    compiled_us = times.get("torch.compile", baselines[best])
    speedups = {
        name: {
            "best": baselines[best] / times[name] if name in times else 1.0,
            "torch.compile": compiled_us / times[name] if name in times else 1.0,
        }
        for name in OURS
        if name in columns
    }
    return {"best": best, "speedups": speedups}


def _describe_row(row: dict[str, Any]) -> str:
    parts = []
    for name, column in row["columns"].items():
        time_text = (
            f"{column['us'] / 1000:.3f}" if "us" in column else column.get("failed", "?")[:60]
        )
        first = f" ({column['first_call_s']:.0f} s)" if "first_call_s" in column else ""
        parts.append(f"{name} {time_text}{first}")
    speedups = row["against"].get("speedups", {})
    ratios = ", ".join(f"{name} {ratio['best']:.2f}x" for name, ratio in speedups.items())
    worst = max((column.get("difference", 0.0) for column in row["columns"].values()), default=0.0)
    return f"{row['model']:18s} {ratios} of {row['against'].get('best')}; ms: {', '.join(parts)}; differs {worst:.1e}"


def _summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"models": len(rows)}
    for name in OURS:
        ratios = [
            row["against"]["speedups"][name]
            for row in rows
            if name in row["against"].get("speedups", {})
        ]
        if ratios:
            best = [ratio["best"] for ratio in ratios]
            summary[name] = {"geomean_vs_best": geometric_mean(best), "worst": min(best)}
    return summary


def geometric_mean(ratios: Sequence[float]) -> float:
    """The geometric mean of positive numbers. Raises ValueError for none."""
    if not ratios:
        raise ValueError("expected at least one ratio, got none")
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _make_document(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = ("size", "precision", "device", "columns", "gpus")
    options = {name: getattr(args, name) for name in names}
    document = report.make_document("real_models", options, rows, environment=report.environment())
    command = document["command"].replace("benchmarks.bench_real_models", "benchmarks.real_models")
    return {**document, "command": command, "summary": _summarise(rows)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_models", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the results file (JSON)")
    add("--models", type=comma_list_of(list(MODELS)), default=list(MODELS))
    add(
        "--columns",
        type=comma_list_of(list(COLUMNS)),
        default=["eager", "torch.compile", "reduce-overhead", "accelerate", "backend"],
    )
    add("--size", choices=("small", "large"), default="small")
    add("--precision", choices=("half", "bf16", "fp16", "fp32"), default="half")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="processes at once")
    add("--gpus", type=int, default=1, help="how many the models are spread over")
    add(
        "--profile", action="store_true", help="kernels of each column, and the floor of each model"
    )
    add("--compile-threads", type=int, default=2, help="of Inductor, in each process")
    add("--limit-s", type=float, default=240.0, help="for the preparation of one batch")
    add("--entries", type=Path, help="a folder for what searches found; see benchmarks.ship")
    return parser


if __name__ == "__main__":
    sys.exit(main())
