"""One mutant or twin put to the judge, and the process that does so. Not in `__main__`: a spawned
process could not import that.
"""

from __future__ import annotations

import argparse
import atexit
import multiprocessing
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch

from benchmarks.kernelbench.processes import die_with_parent
from benchmarks.siege.faults import KINDS, Mutant, make_mutant
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator
from torch_cudal1.judge.sandbox.fork_server import ForkServer

__all__ = [
    "PROFILES",
    "Side",
    "judge_in_process",
    "judge_side",
    "make_numbered_mutant",
    "start_judging",
]

PROFILES = ("fast", "standard", "strict")
# Checks that say a candidate is slow, or that its speed cannot be told: no reason to refuse a twin.
_NO_FAULT = frozenset({"timing", "unstable", "jump"})

Side: TypeAlias = tuple[int, bool]  # number of a mutant, whether its twin is judged

# What a process judges with; set when it starts.
_fork_servers: list[ForkServer | None] = []


def start_judging(args: argparse.Namespace, count: Any) -> None:
    """In each process that judges, `count` started before it. Of several GPUs it sees one."""
    # A killed siege would leave processes that judge on for as long as the queue lasts.
    die_with_parent()
    parent = multiprocessing.parent_process()
    # It may have ended before that was asked for.
    if parent is not None and os.getppid() != parent.pid:
        raise SystemExit(1)
    with count.get_lock():
        position = count.value
        count.value += 1
    if args.gpus > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(position % args.gpus)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.jobs)))
    stack = ExitStack()
    _fork_servers.append(stack.enter_context(ForkServer()) if args.forked else None)
    atexit.register(stack.close)


def make_numbered_mutant(number: int, args: argparse.Namespace) -> Mutant:
    names = list(args.kinds)
    return make_mutant(names[number % len(names)], number)


def judge_in_process(side: Side, args: argparse.Namespace, end: float) -> dict[str, Any] | None:
    """The row of one side; None where the time is up."""
    return judge_side(side, args, _fork_servers[0]) if time.monotonic() < end else None


def judge_side(
    side: Side, args: argparse.Namespace, fork_server: ForkServer | None
) -> dict[str, Any]:
    number, is_twin = side
    mutant = make_numbered_mutant(number, args)
    text = mutant.twin if is_twin else mutant.text
    assert text is not None
    row = _judge(mutant, text, args, fork_server)
    refused = bool(row["refused_by"])
    broken = bool(row["error"])
    row |= {"number": number, "is_twin": is_twin}
    row |= {"got_in": not (refused or is_twin), "twin_refused": (refused or broken) and is_twin}
    checks = row.pop("checks")
    # What a later profile refuses is no news, and texts are most of a results file.
    is_kept = (row["got_in"] and row["is_promised"]) or row["twin_refused"]
    return row | ({"text": text, "checks": checks} if is_kept else {})


def _judge(
    mutant: Mutant, text: str, args: argparse.Namespace, fork_server: ForkServer | None
) -> dict[str, Any]:
    begin = time.monotonic()
    checks: Sequence[CheckResult] = ()
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
        checks = evaluation.verdict.checks
    except SandboxError as error:
        checks = [CheckResult("run", False, detail=str(error))]
    except Exception as error:  # noqa: BLE001
        # An error of the judge itself counts against it, whatever it judged, and the siege goes on.
        broken = f"{type(error).__name__}: {error}"
    failed = [check for check in checks if not check.passed and check.name not in _NO_FAULT]
    return {
        "kind": mutant.kind,
        "subject": mutant.subject.name,
        "damage": mutant.damage,
        "profile": args.profile,
        # Whether the judge says that it refuses this kind at this profile.
        "is_promised": PROFILES.index(KINDS[mutant.kind].first_profile)
        <= PROFILES.index(args.profile),
        "refused_by": failed[0].name if failed else "",
        "detail": failed[0].detail[:200] if failed else "",
        "checks": [[check.name, check.passed, check.detail[:300]] for check in checks],
        "error": broken[:500],
        "seconds": time.monotonic() - begin,
    }
