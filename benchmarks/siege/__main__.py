"""Counts what gets past the judge: `python -m benchmarks.siege --out siege.json`.

Each mutant is an honest module made wrong by kind, at random; its honest twin looks and counts like
it, and is right. A mutant has got in when the judge finds nothing against it, whatever its speed. Kinds that only timed
calls show are timed too. What got in is in the results, text and all.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks import report
from benchmarks.bench_models import comma_list_of
from benchmarks.siege.faults import KINDS, Mutant, make_mutant
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator
from torch_cudal1.judge.sandbox.fork_server import ForkServer

__all__ = ["keep_cores_busy", "main", "summarise"]

_ORDER = ("fast", "standard", "strict")
_PRINTED = ("number", "kind", "subject", "is_twin", "refused_by", "error", "seconds")
_OPTIONS = ("profile", "device", "first", "count", "sides", "rounds", "busy", "forked", "jobs")
# Checks that say a candidate is slow, or that nothing can be said of it: no reason to refuse a twin.
_NO_FAULT = frozenset({"timing", "unstable", "jump", "inputs"})

Side: TypeAlias = tuple[int, bool]  # number of a mutant, whether its twin is judged

# What a process judges with; set when it starts.
_fork_servers: list[ForkServer | None] = []


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
        and not (is_twin and _make_mutant(number, args).twin is None)
    ]
    if args.jobs == 1:
        with ForkServer() if args.forked else nullcontext() as fork_server:
            for side in sides:
                if time.monotonic() < end:
                    yield _judge_side(side, args, fork_server)
        return
    context = get_context("spawn")
    count = context.Value("i", 0)
    with ProcessPoolExecutor(args.jobs, context, _start_judging, (args, count)) as pool:
        futures = [pool.submit(_judge_in_process, side, args, end) for side in sides]
        for future in as_completed(futures):
            row = future.result()
            if row is not None:
                yield row


def _start_judging(args: argparse.Namespace, count: Any) -> None:
    """In each process that judges, `count` started before it. Of several GPUs it sees one."""
    with count.get_lock():
        position = count.value
        count.value += 1
    if args.gpus > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(position % args.gpus)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.jobs)))
    stack = ExitStack()
    _fork_servers.append(stack.enter_context(ForkServer()) if args.forked else None)
    atexit.register(stack.close)


def _make_mutant(number: int, args: argparse.Namespace) -> Mutant:
    names = list(args.kinds)
    return make_mutant(names[number % len(names)], number)


def _judge_in_process(side: Side, args: argparse.Namespace, end: float) -> dict[str, Any] | None:
    """The row of one side; None where the time is up."""
    return _judge_side(side, args, _fork_servers[0]) if time.monotonic() < end else None


def _judge_side(
    side: Side, args: argparse.Namespace, fork_server: ForkServer | None
) -> dict[str, Any]:
    number, is_twin = side
    mutant = _make_mutant(number, args)
    text = mutant.twin if is_twin else mutant.text
    assert text is not None
    row = _judge(mutant, text, args, fork_server)
    refused = bool(row["refused_by"])
    broken = bool(row["error"])
    row |= {"number": number, "is_twin": is_twin}
    row |= {"got_in": not (refused or is_twin), "twin_refused": (refused or broken) and is_twin}
    return row | ({"text": text} if row["got_in"] or row["twin_refused"] else {})


def _judge(
    mutant: Mutant, text: str, args: argparse.Namespace, fork_server: ForkServer | None
) -> dict[str, Any]:
    begin = time.monotonic()
    failed: list[CheckResult] = []
    broken = ""
    config = SourceEvaluationConfig(
        device=torch.device(args.device),
        settings=Settings(),
        contract=Contract(),
        profile=args.profile,
    )
    try:
        with SourceEvaluator(config, fork_server=fork_server) as evaluator:
            evaluation = evaluator.evaluate(
                mutant.subject.write_reference(), text, timed=KINDS[mutant.kind].timed
            )
        failed = [
            check
            for check in evaluation.verdict.checks
            if not check.passed and check.name not in _NO_FAULT
        ]
    except SandboxError as error:
        failed = [CheckResult("run", False, detail=str(error))]
    except Exception as error:  # noqa: BLE001
        # An error of the judge itself counts against it, whatever it judged, and the siege goes on.
        broken = f"{type(error).__name__}: {error}"
    return {
        "kind": mutant.kind,
        "subject": mutant.subject.name,
        "damage": mutant.damage,
        "profile": args.profile,
        # Whether the judge says that it refuses this kind at this profile.
        "is_promised": _ORDER.index(KINDS[mutant.kind].first_profile) <= _ORDER.index(args.profile),
        "refused_by": failed[0].name if failed else "",
        "detail": failed[0].detail[:200] if failed else "",
        "error": broken[:500],
        "seconds": time.monotonic() - begin,
    }


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
    add("--profile", choices=_ORDER, default="fast")
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
