"""Is a source that is the reference itself ever called faster, and is it told the same speed?

    python -m benchmarks.bench_same_source [--device cpu] [--trials 30] [--evaluators 3] [--out same-source.json]

The reference under another name is judged again and again, in a process of its own each time, as
`cudal1 judge` does. Its speed-up over eager is 1; that over another baseline, where one won, is
what the medians of the race say. What two processes with one code differ by is in these figures,
which `repeatability` in one process cannot see. Each evaluator races its baselines anew.
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
from benchmarks.report import document, environment, save
from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Accepted, Contract
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator

__all__ = ["Row", "main", "of_source"]

Row = dict[str, Any]


def of_source(source: Source, device: torch.device, trials: int, evaluators: int) -> Iterator[Row]:
    """A row: how many trials were accepted; of each the speed-up over eager, the lower bound, the
    seconds on the clock and in all.

    It is told after each evaluator, with status `not done` until the last one. `failed` and the reason
    where it was refused or could not be timed: a check that refuses what is right is no speed.
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
    for count in _shares(trials, evaluators):
        with SourceEvaluator(
            SourceEvaluationConfig(Settings(), Contract(), device, "fast")
        ) as evaluator:
            for _ in range(count):
                try:
                    found = evaluator.evaluate(source.text("Model"), source.text("ModelNew"))
                except Cudal1Error as error:
                    yield {**row, "status": "failed", "reason": str(error)[:300]}
                    return
                if found.timing is None or found.baselines is None:
                    yield {**row, "status": "failed", "reason": f"refused: {found.verdict.failure}"}
                    return
                over_eager = (
                    found.baselines.medians_us["eager"]
                    / found.baselines.medians_us[found.timing.baseline]
                )
                row["trials"] += 1
                row["accepted"] += isinstance(found.decision, Accepted)
                row["speedups"].append(round(found.timing.speedup * over_eager, 4))
                row["lows"].append(round(found.timing.low, 4))
                row["timing_s"].append(round(found.elapsed_s["timing"], 3))
                row["judged_s"].append(round(sum(found.elapsed_s.values()), 3))
        whole = row["trials"] == trials
        yield (
            {**row, "status": "ok"}
            if whole
            else {**row, "status": "not done", "reason": f"{row['trials']} of {trials} trials"}
        )


def _shares(trials: int, evaluators: int) -> list[int]:
    """As even as can be, none empty."""
    return [
        count
        for count in (trials // evaluators + (at < trials % evaluators) for at in range(evaluators))
        if count
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 where a trial was refused, or accepted in 1 % of the trials or more."""
    args = _parser().parse_args(argv)
    facts, rows = environment(), list[Row]()
    for number, source in enumerate(SOURCES):
        for row in of_source(source, torch.device(args.device), args.trials, args.evaluators):
            rows[number:] = [row]
            print(_told(row), file=sys.stderr, flush=True)
            summary = _summary(rows)
            if args.out:
                options = {
                    "device": args.device,
                    "trials": args.trials,
                    "courts": args.evaluators,
                }
                save(
                    args.out,
                    document("same_source", options, rows, environment=facts, summary=summary),
                )
    return 0 if summary["passed"] else 1


def _summary(rows: Sequence[Row]) -> Row:
    trials, accepted = sum(row["trials"] for row in rows), sum(row["accepted"] for row in rows)
    failed = sum(row["status"] != "ok" for row in rows)
    return {
        "trials": trials,
        "accepted": accepted,
        "failed": failed,
        "passed": not failed and accepted < 0.01 * trials,
    }


def _told(row: Row) -> str:
    if row["status"] != "ok":
        return f"{row['source']}: {row['reason']}"
    speedups, centre = row["speedups"], statistics.median(row["speedups"])
    return f"{row['source']}: {row['accepted']} of {row['trials']} accepted, {centre:.3f}x, {min(speedups)} to {max(speedups)}"


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="benchmarks.bench_same_source",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    made.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    made.add_argument("--trials", type=int, default=30, help="of each source")
    made.add_argument(
        "--evaluators", type=int, default=3, help="references that are read and raced anew"
    )
    made.add_argument("--out", type=Path)
    return made


if __name__ == "__main__":
    sys.exit(main())
