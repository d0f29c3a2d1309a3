"""The command line: `python -m benchmarks.kernelbench run TASKS --out FILE.jsonl`,
`report FILE.jsonl`, `plan TASKS` and `compile TASKS`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import report as results
from benchmarks.kernelbench import pages, planning, rows
from benchmarks.kernelbench.ahead import compile_ahead
from benchmarks.kernelbench.claims import Claims, order_tasks
from benchmarks.kernelbench.job import OURS, PROFILES, Job
from benchmarks.kernelbench.options import make_parser
from benchmarks.kernelbench.statistics import BEST, compute_geomean, compute_ratios
from benchmarks.kernelbench.task_pool import NothingRunsError, TaskPool
from benchmarks.kernelbench.task_runs import PoolPlan, Result
from benchmarks.kernelbench.task_starter import CACHE
from benchmarks.kernelbench.tasks import (
    Choice,
    TaskError,
    read_release_candidates,
    read_tasks,
    select_tasks,
    shrink_task,
)

__all__ = ["main"]

_GPU_MEMORY_SHARE, _HOST_MEMORY_SHARE = 0.92, 0.6  # the rest is for processes outside this run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: 0 when every chosen task has its row or the report is written; 3 when the
    budget ended first (call again); 2 for wrong usage; 1 when nothing runs here.
    """
    actions = {"run": _run, "report": _report, "plan": _plan_products, "compile": _compile}
    args = make_parser(__doc__, actions).parse_args(argv)
    # an outer `timeout` must not leave processes behind
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return int(args.action(args))
    except (TaskError, OSError) as error:
        print(f"benchmarks.kernelbench: {error}", file=sys.stderr)
        return 2
    except NothingRunsError as error:
        print(f"benchmarks.kernelbench: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    begin = time.monotonic()
    job = _make_job(args)
    all_tasks = read_tasks(args.tasks)
    tasks = select_tasks(all_tasks, Choice(tuple(args.level), tuple(args.only), args.shard))
    tasks = [shrink_task(task, args.scale) for task in tasks]
    candidates = read_release_candidates(args.candidates) if args.candidates else {}
    finished = rows.list_finished(
        (args.out, *args.known), job, tasks, without_failed=args.retry_failed
    )
    remaining = order_tasks([task for task in tasks if (task.key, task.digest) not in finished])
    environment = results.environment()
    machine = f"{job.device} {environment['gpu']}".strip()
    print(
        f"{len(tasks)} tasks, {len(tasks) - len(remaining)} done before; on {machine}; {job.label}",
        flush=True,
    )

    def deliver(result: Result) -> None:
        rows.append_row(args.out, result.task, result.row, job, environment, of=len(all_tasks))
        print(f"{time.monotonic() - begin:6.0f} s  {_format_result(result)}", flush=True)

    plan = _make_plan(args, begin)
    unfinished = TaskPool(job, plan, candidates, deliver).run(remaining)
    run_rows = [row for row in rows.read_rows(args.out) if row["job"] == job.to_json()]
    speedups = [ratio.speedup for ratio in compute_ratios(run_rows, OURS, BEST)] if job.ours else []
    summary = {
        "rows": len(run_rows),
        "left": unfinished,
        "geomean_vs_best": compute_geomean(speedups),
        "wall_s": round(time.monotonic() - begin),
    }
    print(json.dumps(summary))
    return 3 if unfinished else 0


def _make_job(args: argparse.Namespace) -> Job:
    profile = PROFILES[args.profile]
    if args.tune_s is not None:
        profile = replace(profile, tune_s=args.tune_s)
    if args.limit_s is not None:
        profile = replace(profile, limit_s=args.limit_s)
    switches = {
        "ours": args.ours,
        "autotune": args.max_autotune,
        "judged": _name_release(args.candidates),
        "arms": tuple(args.arms),
    }
    return Job(args.device, profile, args.rights, args.mode, args.scale, **switches)


def _name_release(path: Path | None) -> str:
    """A name that tells two release files apart, whatever they are called: it has the start of
    their digest.
    """
    return (
        "" if path is None else f"{path.stem} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    )


def _make_plan(args: argparse.Namespace, begin: float) -> PoolPlan:
    if torch.device(args.device).type == "cuda":
        memory = int(_GPU_MEMORY_SHARE * torch.cuda.get_device_properties(args.device).total_memory)
    else:
        memory = int(_HOST_MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    budget_s = args.budget_s - (time.monotonic() - begin)
    for name in (
        "inductor",
        "triton",
        CACHE,
    ):  # confined processes are let into folders that are there
        (args.work / name).mkdir(parents=True, exist_ok=True)
    claims = Claims(args.claims.resolve()) if args.claims else None
    options: dict[str, Any] = {"freeze": args.freeze, "fork": args.fork, "claims": claims}
    return PoolPlan(
        args.work.resolve(), args.workers, args.threads, memory, budget_s, args.reserve_s, **options
    )


def _format_result(result: Result) -> str:
    """A line for a terminal."""
    row, name = result.row, f"{result.task.key:6} {result.task.name[:40]:40}"
    columns = row["columns"]
    cells = [
        f"{base} {column['us']:.0f}"
        for base, column in columns.items()
        if column.get("us") is not None
    ]
    best = row["against"].get(OURS, {}).get(BEST)
    speed = f"{best['speedup']:.3f}x of best ({row['best']})" if best else f"best {row['best']}"
    why = "; ".join(
        f"{base} {column['status']}: {column['reason'][:120]}"
        for base, column in columns.items()
        if column["status"] != "ok"
    )
    return (
        f"{name} {speed}; us: {', '.join(cells)}{'; ' + why if why else ''}; {row['wall_s']:.0f} s"
    )


def _report(args: argparse.Namespace) -> int:
    read_rows = rows.read_rows(*args.files)
    if not read_rows:
        raise TaskError(
            f"{', '.join(map(str, args.files))}: no row of this benchmark; expected a file made by `run --out`"
        )
    tables = pages.render_markdown(read_rows)
    if args.markdown:
        args.markdown.write_text(tables + "\n", encoding="utf-8")
    if args.html:
        args.html.write_text(pages.render_html(read_rows), encoding="utf-8")
    if not args.markdown:
        print(tables)
    return 0


def _plan_products(args: argparse.Namespace) -> int:
    tasks = select_tasks(read_tasks(args.tasks), Choice(tuple(args.level), tuple(args.only)))
    if args.coverage:
        coverages = [planning.find_coverage(task, sm=args.sm) for task in tasks]
        print(
            json.dumps([asdict(item) for item in coverages])
            if args.json
            else planning.format_coverage(coverages)
        )
        return 0
    plans = [
        item
        for task in tasks
        for item in planning.plan_products(task, sm=args.sm, compiling=args.compile)
    ]
    print(
        json.dumps([item.to_json() for item in plans]) if args.json else planning.format_plan(plans)
    )
    return 0


def _compile(args: argparse.Namespace) -> int:
    begin = time.monotonic()
    tasks = order_tasks(
        select_tasks(read_tasks(args.tasks), Choice(tuple(args.level), tuple(args.only)))
    )
    options = {
        "sm": args.sm,
        "rights": args.rights,
        "processes": args.processes,
        "until": begin + args.budget_s,
    }
    summary = compile_ahead(tasks, args.work.resolve() / CACHE, **options)
    print(json.dumps(asdict(summary)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
