"""Counts what gets past the judge: `python -m benchmarks.siege --out siege.json`.

Each mutant is an honest module made wrong by kind, at random; its honest twin looks and counts like
it, and is right. A mutant has got in when the judge finds nothing against it, whatever its speed. Kinds that only timed
calls show are timed too. What got in is in the results, text and all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.bench_models import comma_list_of
from benchmarks.siege.faults import KINDS
from benchmarks.siege.judging import (
    PROFILES,
    judge_in_process,
    judge_side,
    make_numbered_mutant,
    start_judging,
)
from torch_cudal1.judge.sandbox.fork_server import ForkServer

__all__ = ["keep_cores_busy", "main", "summarise"]

_PRINTED = ("number", "kind", "subject", "is_twin", "refused_by", "error", "seconds")
_OPTIONS = ("profile", "device", "first", "count", "sides", "rounds", "busy", "forked", "jobs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the siege and write its results. Exit code 1 if a mutant got in that this
    profile promises to refuse, or a twin was refused.
    """
    args = _parser().parse_args(argv)
    rows: list[dict[str, Any]] = []
    options = {name: getattr(args, name) for name in _OPTIONS}
    environment = report.environment()
    with keep_cores_busy(args.busy):
        for row in _judge_all(args):
            rows.append(row)
            print(json.dumps({key: row[key] for key in _PRINTED}), flush=True)
            document = report.make_document("siege", options, rows, environment=environment)
            report.save(args.out, {**document, "summary": summarise(rows)})
    print(json.dumps(summarise(rows), indent=1))
    return int(any((row["got_in"] and row["is_promised"]) or row["twin_refused"] for row in rows))


@contextmanager
def keep_cores_busy(count: int) -> Iterator[None]:
    """`count` processes compute for nothing within the block."""
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def _judge_all(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each side, in the order in which they are judged."""
    end = time.monotonic() + args.total_limit_s
    sides = [
        (number, is_twin)
        for _ in range(args.rounds)
        for number in range(args.first, args.first + args.count)
        for is_twin in (False, True)
        if args.sides != ("mutants" if is_twin else "twins")
        and not (is_twin and make_numbered_mutant(number, args).twin is None)
    ]
    if args.jobs == 1:
        with ForkServer() if args.forked else nullcontext() as fork_server:
            for side in sides:
                if time.monotonic() < end:
                    yield judge_side(side, args, fork_server)
        return
    context = get_context("spawn")
    count = context.Value("i", 0)
    with ProcessPoolExecutor(args.jobs, context, start_judging, (args, count)) as pool:
        futures = [pool.submit(judge_in_process, side, args, end) for side in sides]
        for future in as_completed(futures):
            row = future.result()
            if row is not None:
                yield row


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By kind how many mutants were tried and how many got in, and how often honest twins were
    judged and refused.
    """
    mutants = [row for row in rows if not row["is_twin"]]
    kinds: dict[str, Any] = {}
    for row in mutants:
        kind = kinds.setdefault(row["kind"], {"tried": 0, "got_in": 0})
        kind["tried"] += 1
        kind["got_in"] += row["got_in"]
    promised = [row for row in mutants if row["is_promised"]]
    return {
        "mutants": len(mutants),
        "got_in": sum(row["got_in"] for row in mutants),
        "promised": len(promised),
        "promised_got_in": sum(row["got_in"] for row in promised),
        "twins": len(rows) - len(mutants),
        "twins_refused": sum(row["twin_refused"] for row in rows),
        "median_s": statistics.median(row["seconds"] for row in rows) if rows else None,
        "kinds": kinds,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.siege", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="results file (JSON)")
    add("--kinds", type=comma_list_of(list(KINDS)), default=list(KINDS), help="in turn")
    add("--count", type=int, default=len(KINDS), help="mutants")
    add("--first", type=int, default=0, help="number of the first")
    add("--profile", choices=PROFILES, default="fast")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--sides", choices=("mutants", "twins", "both"), default="mutants", help="what is judged")
    add("--rounds", type=int, default=1, help="how often all of them are judged")
    add("--busy", type=int, default=0, metavar="N", help="processes that keep cores busy meanwhile")
    add("--forked", action="store_true", help="fork the judge's processes: starts take less time")
    add("--jobs", type=int, default=1, help="processes that judge at once")
    add("--gpus", type=int, default=1, help="over which the processes are spread")
    add("--total-limit-s", type=float, default=3600.0, help="of all of them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
