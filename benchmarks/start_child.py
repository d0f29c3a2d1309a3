"""One contender's first answer in this process, for `bench_warm_start`: what a user's process
imports, builds and calls, timed.

Run as `python -m benchmarks.start_child MODEL CONTENDER cold|warm ...`; the last line of its output
is JSON. Until the clock has stopped it imports torch, the model and the contender, and no module of
the benchmarks that imports compilers or the judge. The answer is verified afterwards.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import Inputs, Workload, build

__all__ = ["STARTS", "main", "record_started_programs"]

_MAX_EVENT_CHARS = (
    6000  # characters of an event: why a compiler failed stands at the end of a traceback
)
_NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg")


Start = Callable[[torch.nn.Module, Inputs, Mapping[str, Any]], Callable[..., Any]]


def _load_accelerate() -> Start:
    import cudal1  # inside the measured time, as the import of torch is

    accelerate = cudal1.accelerate  # imports what it needs
    return lambda module, inputs, options: accelerate(module, inputs, **options)


def _load_backend() -> Start:
    from torch_cudal1.api.backend import (
        cudal1,  # what the registered name loads; a checkout need not be installed
    )

    return lambda module, inputs, options: torch.compile(
        module, backend=cudal1, options=dict(options)
    )


STARTS: Mapping[str, Callable[[], Start]] = {
    "eager": lambda: lambda module, inputs, options: module,
    "torch.compile": lambda: lambda module, inputs, options: torch.compile(module),
    "cudal1.accelerate": _load_accelerate,
    "cudal1 backend": _load_backend,
}


def record_started_programs(started: list[str], *, offline: bool) -> None:
    """Append the name of every program that this process starts from now on to `started`; offline,
    every use of the network raises.
    """

    def listen(event: str, args: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
            started.append(os.path.basename(os.fsdecode(args[0])))
        elif offline and (
            event == "socket.getaddrinfo"
            or (event in _NETWORK and args[0].family != socket.AF_UNIX)
        ):
            raise ConnectionError(f"{event}{args[1:]}: this process has no network")

    sys.addaudithook(listen)


def main(argv: Sequence[str] | None = None) -> int:
    """Answer once, then verify."""
    imported = time.monotonic()
    args = _parser().parse_args(argv)
    started: list[str] = []
    record_started_programs(started, offline=args.offline)
    workload = build(args.model, sizes=args.sizes, device=args.device)
    # Warm: a miss is an error, so that a decision that was not found cannot pass for one that was.
    on_miss = "tune" if args.state == "cold" else "error"
    options = {"on_miss": on_miss, "budget_s": args.budget_s, "cache_dir": args.cache_dir}
    module = copy.deepcopy(workload.module).eval()  # the verification needs it untouched
    built = time.monotonic()
    start = STARTS[args.contender]()
    loaded = time.monotonic()
    with torch.no_grad():
        call = start(module, workload.inputs, options)
        prepared = time.monotonic()
        call(*workload.inputs)
        if args.device.startswith("cuda"):
            torch.cuda.synchronize()
    answered = time.monotonic()
    began_programs, inductor = list(started), _read_inductor_counters()
    # before anything else runs
    counters, decisions = _read_telemetry() if args.contender.startswith("cudal1") else ({}, [])
    stages = {"import": imported - args.spawned, "build": built - imported, "load": loaded - built}
    stages |= {"prepare": prepared - loaded, "first_call": answered - prepared}
    answer = {
        "first_answer_s": answered - args.spawned,
        "stages_s": stages,
        "counters": counters,
        "decisions": decisions,
    }
    record = {**answer, "started": began_programs, "inductor": inductor}
    print(json.dumps({**record, **_verify_answer(workload, call)}))
    return 0


def _read_inductor_counters() -> dict[str, int]:
    """Inductor's hits and misses in its caches; {} in a process that has not loaded it."""
    loaded = sys.modules.get("torch._dynamo.utils")
    return (
        {}
        if loaded is None
        else {
            name: int(count)
            for name, count in loaded.counters["inductor"].items()
            if "cache" in name
        }
    )


def _read_telemetry() -> tuple[dict[str, int], list[str]]:
    """The package's counters, and its events of judging, swapping and falling back."""
    import cudal1

    report = cudal1.report()
    decided = [
        event
        for event in report.events
        if event.stage in ("judge", "swap", "capture") or event.what == "fallback"
    ]
    return dict(report.counters), [
        f"{event.stage} {event.what} {dict(event.facts)}"[:_MAX_EVENT_CHARS] for event in decided
    ]


def _verify_answer(workload: Workload, call: Callable[..., Any]) -> dict[str, Any]:
    """Whether an answer to fresh inputs is right."""
    from benchmarks.compare import compare  # brings the judge
    from benchmarks.runner import Case, compute_references

    case = Case(workload, "inference")
    with case.mode():
        (fresh, ref), *_ = compute_references(case, draws=1)
        verdict = compare({"output": call(*fresh).detach().clone()}, ref)
    return {
        "verified": verdict.passed,
        "error_ratio": verdict.error_ratio,
        "reason": verdict.reason,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.start_child", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("model")
    parser.add_argument("contender", choices=list(STARTS))
    parser.add_argument("state", choices=("cold", "warm"))
    parser.add_argument("--sizes", choices=("full", "small"), required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument(
        "--budget-s", type=float, required=True, help="the package's search budget, cold only"
    )
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument(
        "--spawned",
        type=float,
        required=True,
        help="time.monotonic() when the process was started",
    )
    parser.add_argument("--offline", action="store_true", help="whatever uses the network raises")
    return parser


if __name__ == "__main__":
    sys.exit(main())
