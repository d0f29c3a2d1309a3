"""Counts what gets past the judge: `python -m benchmarks.siege --out siege.json`.

Each mutant is an honest module made wrong by kind, at random; its honest twin looks and counts like
it, and is right. A mutant has got in when the judge finds nothing against it, whatever its speed. Kinds that only timed
calls show are timed too. What got in is in the results, text and all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.bench_models import comma_list_of
from benchmarks.siege.faults import KINDS, Mutant, make_mutant
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator

__all__ = ["main", "summarise"]

_ORDER = ("fast", "standard", "strict")
_PRINTED = ("number", "kind", "subject", "refused_by", "seconds")
# Checks that say a candidate is slow, or that nothing can be said of it: no reason to refuse a twin.
_NO_FAULT = frozenset({"timing", "unstable", "jump", "inputs"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the siege and write its results. Exit code 1 if a mutant got in that this
    profile promises to refuse, or a twin was refused.
    """
    args = _parser().parse_args(argv)
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + args.total_limit_s
    names = list(args.kinds)
    for number in range(args.first, args.first + args.count):
        if time.monotonic() > end:
            break
        kind = names[number % len(names)]
        mutant = make_mutant(kind, number)
        row = _judge_mutant(mutant, number, args)
        rows.append(row)
        print(json.dumps({key: row[key] for key in _PRINTED}), flush=True)
        if args.twins and mutant.twin is not None:
            rows.append(_judge_twin(mutant, number, args))
        options = {"profile": args.profile, "device": args.device, "count": args.count}
        document = report.make_document("siege", options, rows, environment=report.environment())
        report.save(args.out, {**document, "summary": summarise(rows)})
    print(json.dumps(summarise(rows), indent=1))
    return int(any((row["got_in"] and row["is_promised"]) or row["twin_refused"] for row in rows))


def _judge_mutant(mutant: Mutant, number: int, args: argparse.Namespace) -> dict[str, Any]:
    row = _judge(mutant, mutant.text, number, args)
    row |= {"is_twin": False, "got_in": not row["refused_by"], "twin_refused": False}
    return row | ({"text": mutant.text} if row["got_in"] else {})


def _judge_twin(mutant: Mutant, number: int, args: argparse.Namespace) -> dict[str, Any]:
    assert mutant.twin is not None
    row = _judge(mutant, mutant.twin, number, args)
    row |= {"is_twin": True, "got_in": False, "twin_refused": bool(row["refused_by"])}
    return row | ({"text": mutant.twin} if row["twin_refused"] else {})


def _judge(mutant: Mutant, text: str, number: int, args: argparse.Namespace) -> dict[str, Any]:
    begin = time.monotonic()
    failed: list[CheckResult] = []
    config = SourceEvaluationConfig(
        device=torch.device(args.device),
        settings=Settings(),
        contract=Contract(),
        profile=args.profile,
    )
    try:
        with SourceEvaluator(config) as evaluator:
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
    return {
        "number": number,
        "kind": mutant.kind,
        "subject": mutant.subject.name,
        "damage": mutant.damage,
        "profile": args.profile,
        # Whether the judge says that it refuses this kind at this profile.
        "is_promised": _ORDER.index(KINDS[mutant.kind].first_profile) <= _ORDER.index(args.profile),
        "refused_by": failed[0].name if failed else "",
        "detail": failed[0].detail[:200] if failed else "",
        "seconds": time.monotonic() - begin,
    }


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By kind how many mutants were tried and how many got in, and the honest twins that were
    refused.
    """
    mutants = [row for row in rows if not row["is_twin"]]
    kinds: dict[str, Any] = {}
    for row in mutants:
        kind = kinds.setdefault(row["kind"], {"tried": 0, "got_in": 0})
        kind["tried"] += 1
        kind["got_in"] += row["got_in"]
    return {
        "mutants": len(mutants),
        "got_in": sum(row["got_in"] for row in mutants),
        "twins": len(rows) - len(mutants),
        "twins_refused": sum(row["twin_refused"] for row in rows),
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
    add("--twins", action="store_true", help="judge the honest twins too")
    add("--total-limit-s", type=float, default=3600.0, help="of all of them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
