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
from benchmarks.kernelbench.ablation import ARMS
from benchmarks.kernelbench.ahead import compile_ahead
from benchmarks.kernelbench.claims import Claims, order_tasks
from benchmarks.kernelbench.crew import CACHE, NothingRunsError, PoolPlan, Result, TaskPool
from benchmarks.kernelbench.job import LABELS, OURS, PROFILES, Job
from benchmarks.kernelbench.statistics import BEST, compute_geomean, compute_ratios
from benchmarks.kernelbench.tasks import (
    LEVELS,
    Choice,
    TaskError,
    read_release_candidates,
    read_tasks,
    select_tasks,
    shrink_task,
)

__all__ = ["main"]

_GPU_MEMORY_SHARE, _HOST_MEMORY_SHARE = 0.92, 0.6  # the rest is of processes that nobody counts


def main(argv: Sequence[str] | None = None) -> int:
    """0: every chosen task has its row, or the report is written; 3: the budget ended first, call
    again; 2: wrong usage; 1: nothing runs here.
    """
    args = _parser().parse_args(argv)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # an outer `timeout` must not leave processes behind
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
    """Two release files are two columns, whatever they are called."""
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


def _parse_shard(text: str) -> tuple[int, int]:
    at, _, of = text.partition("/")
    if not (at.isdigit() and of.isdigit() and int(at) < int(of)):
        raise argparse.ArgumentTypeError(f"{text!r}; expected I/N with 0 <= I < N, such as 0/4")
    return int(at), int(of)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.kernelbench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _run_options(commands.add_parser("run", help="measure; goes on where FILE.jsonl ends"))
    report = commands.add_parser("report", help="tables and a page from one or more FILE.jsonl")
    report.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    report.add_argument(
        "--markdown",
        type=Path,
        metavar="PATH",
        help="write the tables here instead of printing them",
    )
    report.add_argument(
        "--html", type=Path, metavar="PATH", help="a self-contained page with plots"
    )
    report.set_defaults(action=_report)
    products = commands.add_parser(
        "plan", help="the kernels that would be tried for each matrix product; needs no GPU"
    )
    products.add_argument("tasks", metavar="TASKS", help="as for run")
    products.add_argument("--level", type=int, nargs="+", choices=LEVELS, default=list(LEVELS))
    products.add_argument("--only", nargs="+", default=[], metavar="LEVEL/NUMBER")
    products.add_argument(
        "--sm", type=int, default=90, metavar="NUMBER", help="architecture, such as 90 for sm_90"
    )
    products.add_argument(
        "--compile", action="store_true", help="build the best proposal of each product"
    )
    products.add_argument(
        "--coverage",
        action="store_true",
        help="kinds of candidates of each task instead, and who has none",
    )
    products.add_argument("--json", action="store_true")
    products.set_defaults(action=_plan_products)
    ahead = commands.add_parser(
        "compile", help="compile those kernels ahead, for a run with the same --work; needs no GPU"
    )
    ahead.add_argument("tasks", metavar="TASKS", help="as for run")
    ahead.add_argument("--work", type=Path, default=Path("kernelbench-work"))
    ahead.add_argument("--level", type=int, nargs="+", choices=LEVELS, default=list(LEVELS))
    ahead.add_argument("--only", nargs="+", default=[], metavar="LEVEL/NUMBER")
    ahead.add_argument("--rights", choices=LABELS, default="default", help="as for run")
    ahead.add_argument("--sm", type=int, default=90, metavar="NUMBER")
    ahead.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    ahead.add_argument("--budget-s", type=float, default=600.0)
    ahead.set_defaults(action=_compile)
    return parser


def _run_options(run: argparse.ArgumentParser) -> None:
    cuda = torch.cuda.is_available()
    cores = len(os.sched_getaffinity(0))
    run.add_argument(
        "tasks",
        metavar="TASKS",
        help="a checkout of KernelBench, a CUDA-L1 release .json, or hf:OWNER/NAME",
    )
    run.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="a line for each task; what is there is not redone",
    )
    run.add_argument("--level", type=int, nargs="+", choices=LEVELS, default=list(LEVELS))
    run.add_argument("--only", nargs="+", default=[], metavar="LEVEL/NUMBER")
    run.add_argument(
        "--shard",
        type=_parse_shard,
        default=(0, 1),
        metavar="I/N",
        help="every N-th task, from the I-th",
    )
    run.add_argument("--profile", choices=PROFILES, default="quick")
    run.add_argument(
        "--rights",
        choices=LABELS,
        default="default",
        help="precision that everyone has; " + "; ".join(LABELS.values()),
    )
    run.add_argument(
        "--mode",
        choices=("eval", "train"),
        default="eval",
        help="of the modules; always without gradients",
    )
    run.add_argument("--device", default="cuda:0" if cuda else "cpu")
    run.add_argument(
        "--candidates",
        type=Path,
        metavar="RELEASE.json",
        help="judge a CUDA-L1 release's code as one more column",
    )
    run.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        default=[],
        help="ablation: searches with techniques left out, as columns",
    )
    run.add_argument(
        "--max-autotune", action="store_true", help="one more baseline, slow to compile"
    )
    run.add_argument(
        "--ours",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the package's own column",
    )
    run.add_argument(
        "--scale", type=int, default=1, help="cut sizes down by this, to try things out: no result"
    )
    run.add_argument(
        "--budget-s",
        type=float,
        default=540.0,
        help="of this call; what is left is done by the next",
    )
    run.add_argument(
        "--reserve-s", type=float, default=40.0, help="start no task with less of the budget left"
    )
    run.add_argument(
        "--tune-s", type=float, help="the search's budget for a task, if not the profile's"
    )
    run.add_argument(
        "--limit-s", type=float, help="when a task's process is ended, if not the profile's"
    )
    run.add_argument(
        "--workers",
        type=int,
        default=max(1, cores // 4),
        help="tasks at work at once; each starts up to four processes",
    )
    run.add_argument("--threads", type=int, default=1, help="of each task's process")
    run.add_argument(
        "--freeze",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="stop the others while one measures",
    )
    run.add_argument(
        "--fork",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="tasks' processes from one template",
    )
    run.add_argument(
        "--claims",
        type=Path,
        metavar="DIR",
        help="share the tasks with other runs that are given the same folder",
    )
    run.add_argument(
        "--known",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE.jsonl",
        help="rows of other files: not redone",
    )
    run.add_argument(
        "--retry-failed", action="store_true", help="do tasks again whose row has a failed column"
    )
    run.add_argument(
        "--work",
        type=Path,
        default=Path("kernelbench-work"),
        help="compiler caches and logs, kept between calls",
    )
    run.set_defaults(action=_run)


if __name__ == "__main__":
    sys.exit(main())
