"""From the first line that needs a model's answer to that answer, in a new process, with what an
earlier process left on the disk and without: `python -m benchmarks.real_models.start --out start.json`.

Imports and the building of the model are off the clock: they are alike for all ways. The cold
processes run side by side; then each warm process runs alone, the ways taking turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import report
from benchmarks.bench_models import comma_list_of
from benchmarks.real_models.column_run import ColumnRun, await_preparation, end, start_column
from benchmarks.real_models.zoo import MODELS

__all__ = ["main"]

WAYS = ("torch.compile", "reduce-overhead", "accelerate", "accelerate-recall", "backend")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and write its results. Exit code 1 if a process failed."""
    args = _parser().parse_args(argv)
    rows: list[dict[str, Any]] = []
    end_s = time.monotonic() + args.total_limit_s
    with tempfile.TemporaryDirectory(prefix="real-starts-") as scratch:
        cold = _start_cold(args, Path(scratch))
        for model in args.models:
            if time.monotonic() > end_s:
                break
            ways = {way: _read_cold(cold[model, way]) for way in args.columns}
            for _ in range(args.runs):
                for way, facts in ways.items():
                    if "failed" not in facts and time.monotonic() < end_s:
                        folder = Path(scratch) / f"{model}.{way}"
                        facts["warm_runs_s"].append(_measure_start(model, way, args, folder))
            for facts in ways.values():
                seconds = [run for run in facts.get("warm_runs_s", ()) if isinstance(run, float)]
                facts["warm_s"] = median(seconds) if seconds else None
            rows.append({"model": model, "ways": ways})
            print(json.dumps(rows[-1]), flush=True)
            _save(args, rows)
    return 1 if any("failed" in facts for row in rows for facts in row["ways"].values()) else 0


def _start_cold(args: argparse.Namespace, scratch: Path) -> dict[tuple[str, str], ColumnRun]:
    """One process for each model and way, at most `workers` at once, until all have answered."""
    pairs = [(model, way) for model in args.models for way in args.columns]
    runs: dict[tuple[str, str], ColumnRun] = {}
    for begin in range(0, len(pairs), args.workers):
        batch = [
            start_column(model, way, args, scratch / f"{model}.{way}")
            for model, way in pairs[begin : begin + args.workers]
        ]
        await_preparation(batch, args.limit_s)
        for run in batch:
            end(run)
            runs[run.model, run.column] = run
    return runs


def _read_cold(run: ColumnRun) -> dict[str, Any]:
    if not run.is_ready:
        return dict(run.facts)
    names = ("first_call_s", "ready_s", "difference", "runs")
    facts = {name: run.facts[name] for name in names}
    return {"cold_s": facts.pop("first_call_s"), **facts, "warm_runs_s": []}


def _measure_start(model: str, way: str, args: argparse.Namespace, folder: Path) -> float | str:
    """Seconds to the first answer of a process that finds the caches of `folder`, or why it has
    none.
    """
    run = start_column(model, way, args, folder)
    try:
        await_preparation([run], args.limit_s)
    finally:
        end(run)
    return float(run.facts["first_call_s"]) if run.is_ready else str(run.facts["failed"])


def _save(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    options = {name: getattr(args, name) for name in ("size", "precision", "device", "runs")}
    document = report.make_document(
        "real_models.start", options, rows, environment=report.environment()
    )
    command = document["command"].replace("benchmarks.bench_real", "benchmarks.real")
    report.save(args.out, {**document, "command": command})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_models.start", description=__doc__
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="results file (JSON)")
    add("--models", type=comma_list_of(list(MODELS)), default=["bert-base"])
    add("--columns", type=comma_list_of(WAYS), default=list(WAYS), help="ways of running")
    add("--size", choices=("small", "large"), default="small")
    add("--precision", choices=("half", "bf16", "fp16", "fp32"), default="half")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--runs", type=int, default=3, help="warm starts of each way")
    add("--workers", type=int, default=8, help="cold processes at once")
    add("--compile-threads", type=int, default=2, help="of Inductor, in each process")
    add("--limit-s", type=float, default=240.0, help="of one process")
    add("--total-limit-s", type=float, default=3600.0, help="of all of them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
