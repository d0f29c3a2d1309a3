"""Whether a candidate that is the reference itself is ever called faster, and which speed it is
given.

    python -m benchmarks.bench_same_source [--device cpu] [--trials 30] [--evaluators 3] [--out same-source.json]

The reference under another name is judged again and again, in a new process each time, as `cudal1
judge` does. Its true speed-up over eager is 1; where another baseline was the fastest, the speed-up
over eager follows from the baselines' medians. These figures include what two processes with the
same code differ by, which `repeatability`, in one process, cannot see. Each evaluator times its
baselines again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_judge import SOURCES, Source
from benchmarks.report import environment, make_document, save
from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Accepted, Contract
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator

__all__ = ["Row", "main", "measure_source"]

Row = dict[str, Any]


def measure_source(
    source: Source, device: torch.device, trials: int, evaluators: int
) -> Iterator[Row]:
    """A row: how many trials were accepted; of each the speed-up over eager, the lower bound of its
    interval, the seconds of timing and of the whole evaluation.

    The row is yielded after each evaluator, with status `not done` until the last one. Its status
    is `failed`, with the reason, where a trial was refused or could not be timed: a check that
    refuses a right candidate says nothing about speed.
    """
    row: Row = {
        "source": source.name,
        "trials": 0,
        "accepted": 0,
        "speedups": [],
        "lows": [],
        "timing_s": [],
        "judged_s": [],
    }
    for count in _split_evenly(trials, evaluators):
        config = SourceEvaluationConfig(Settings(), Contract(), device, "fast")
        with SourceEvaluator(config) as evaluator:
            for _ in range(count):
                try:
                    evaluation = evaluator.evaluate(source.text("Model"), source.text("ModelNew"))
                except Cudal1Error as error:
                    yield {**row, "status": "failed", "reason": str(error)[:300]}
                    return
                if evaluation.timing is None or evaluation.baselines is None:
                    reason = f"refused: {evaluation.verdict.failure}"
                    yield {**row, "status": "failed", "reason": reason}
                    return
                medians_us = evaluation.baselines.medians_us
                over_eager = medians_us["eager"] / medians_us[evaluation.timing.baseline]
                row["trials"] += 1
                row["accepted"] += isinstance(evaluation.decision, Accepted)
                row["speedups"].append(round(evaluation.timing.speedup * over_eager, 4))
                row["lows"].append(round(evaluation.timing.low, 4))
                row["timing_s"].append(round(evaluation.elapsed_s["timing"], 3))
                row["judged_s"].append(round(sum(evaluation.elapsed_s.values()), 3))
        reason = f"{row['trials']} of {trials} trials"
        is_complete = row["trials"] == trials
        yield row | ({"status": "ok"} if is_complete else {"status": "not done", "reason": reason})


def _split_evenly(trials: int, evaluators: int) -> list[int]:
    """How many trials each evaluator has: as even as possible, none with zero."""
    return [
        count
        for count in (trials // evaluators + (at < trials % evaluators) for at in range(evaluators))
        if count
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 where a trial was refused, or accepted in 1 % of the trials or more."""
    args = _parser().parse_args(argv)
    machine, rows = environment(), list[Row]()
    for number, source in enumerate(SOURCES):
        for row in measure_source(source, torch.device(args.device), args.trials, args.evaluators):
            rows[number:] = [row]
            print(_format_row(row), file=sys.stderr, flush=True)
            summary = _summarise(rows)
            if args.out:
                options = {
                    "device": args.device,
                    "trials": args.trials,
                    "courts": args.evaluators,
                }
                save(
                    args.out,
                    make_document(
                        "same_source", options, rows, environment=machine, summary=summary
                    ),
                )
    return 0 if summary["passed"] else 1


def _summarise(rows: Sequence[Row]) -> Row:
    trials, accepted = sum(row["trials"] for row in rows), sum(row["accepted"] for row in rows)
    failed = sum(row["status"] != "ok" for row in rows)
    return {
        "trials": trials,
        "accepted": accepted,
        "failed": failed,
        "passed": not failed and accepted < 0.01 * trials,
    }


def _format_row(row: Row) -> str:
    if row["status"] != "ok":
        return f"{row['source']}: {row['reason']}"
    speedups, centre = row["speedups"], statistics.median(row["speedups"])
    return f"{row['source']}: {row['accepted']} of {row['trials']} accepted, {centre:.3f}x, {min(speedups)} to {max(speedups)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_same_source",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--trials", type=int, default=30, help="of each source")
    parser.add_argument(
        "--evaluators",
        type=int,
        default=3,
        help="source evaluators, each of which times the baselines again",
    )
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
