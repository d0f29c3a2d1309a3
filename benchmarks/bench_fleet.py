"""`cudal1 warmup` with 1, 2 and 4 workers: tasks finished per second by the command itself, start
of the workers included.

Each run has the same number of tasks for each worker, all of them different and none in a cache: a
machine that scales perfectly takes as long for four workers as for one. Inductor's and Triton's
caches are empty for every run. A run is a failed row if one of its tasks failed, or if it validated
fewer candidates than it had tasks. Workers of GPUs (`--devices gpu`) get equal shares of the cores,
as the command gives them; `--cores-per-device` gives runs with fewer GPUs fewer cores too, so that
GPUs with their cores are compared, not cores. The first run of a machine that has just started
reads from a cold disk: run the benchmark once before the run that counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import report
from benchmarks.bench_models import kill_group, make_child_environment

__all__ = ["WarmupRun", "compare_with_goal", "main", "write_tasks"]

_ROOT = Path(__file__).resolve().parent.parent
_GOAL_SPEEDUP = {4: 3.4}
# A product whose rows are summed, which a rewrite makes a product with one vector on any device,
# and a chain with a softmax, which a template serves on a GPU: there is something to judge
# everywhere. {width} makes each task new.
_TASK = """import torch


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width))
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.softmax(torch.nn.functional.gelu(x) * self.weight, dim=-1), self.linear(x).sum(dim=1, keepdim=True)


def get_inputs():
    return [torch.randn({rows}, {width})]


def get_init_inputs():
    return [{width}]
"""


@dataclass(frozen=True)
class WarmupRun:
    """One line of the results: a warm-up of `tasks` tasks by `workers` workers."""

    workers: int
    tasks: int
    status: Literal["ok", "failed", "not run"]
    reason: str = ""
    seconds: float | None = None
    tasks_per_s: float | None = None
    judged: int = 0
    task_seconds: Sequence[float] = ()  # of each task alone, in its worker

    @property
    def steady_tasks_per_s(self) -> float | None:
        """Throughput by the tasks' own times, without the start of the workers."""
        return (
            self.workers * len(self.task_seconds) / sum(self.task_seconds)
            if self.task_seconds
            else None
        )


def compare_with_goal(runs: Sequence[WarmupRun]) -> dict[str, Any]:
    """Each run's throughput over that of one worker, and whether the goal for that many is reached."""
    rates = {run.workers: run.tasks_per_s for run in runs if run.tasks_per_s is not None}
    if 1 not in rates:
        return {}
    times = {
        workers: rate / rates[1]
        for workers, rate in sorted(rates.items())
        if rate is not None and rates[1]
    }
    reached = {
        workers: times[workers] >= least
        for workers, least in _GOAL_SPEEDUP.items()
        if workers in times
    }
    return {"throughput_over_one": times, "goal": _GOAL_SPEEDUP, "reached": reached}


def write_tasks(folder: Path, count: int, *, rows: int, first_width: int) -> list[Path]:
    """Write `count` KernelBench-style files, all different, each with one region."""
    folder.mkdir(parents=True)
    paths = []
    for number in range(count):
        paths.append(folder / f"task_{number:02}.py")
        paths[-1].write_text(
            _TASK.replace("{rows}", str(rows)).replace("{width}", str(first_width + 16 * number))
        )
    return paths


def main(argv: Sequence[str] | None = None) -> int:
    """Run every count of workers; 0 when all rows are "ok" and every goal was reached."""
    args = _parser().parse_args(argv)
    # an outer `timeout` must not leave workers behind
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    environment, runs = report.environment(), []
    print(json.dumps(environment), flush=True)
    deadline = time.monotonic() + args.total_limit_s
    options = {
        name: getattr(args, name)
        for name in ("devices", "counts", "tasks_per_worker", "budget_s", "cores_per_device")
    }
    for workers in args.counts:
        runs.append(
            _measure_run(args, workers, min(args.time_limit_s, deadline - time.monotonic()))
        )
        print(_format_run(runs[-1]), flush=True)
        rows = [asdict(run) | {"steady_tasks_per_s": run.steady_tasks_per_s} for run in runs]
        report.save(
            args.out,
            report.make_document(
                "fleet", options, rows, environment=environment, **compare_with_goal(runs)
            ),
        )
    goal_summary = compare_with_goal(runs)
    print(json.dumps({"out": args.out.name, **goal_summary}))
    return (
        0
        if all(run.status == "ok" for run in runs) and all(goal_summary.get("reached", {}).values())
        else 1
    )


def _measure_run(args: argparse.Namespace, workers: int, limit_s: float) -> WarmupRun:
    """One warm-up in a new folder."""
    tasks = workers * args.tasks_per_worker
    if limit_s < 1:
        return WarmupRun(workers, tasks, "not run", "the total limit was reached")
    if args.devices == "gpu" and torch.cuda.device_count() < workers:
        return WarmupRun(
            workers,
            tasks,
            "not run",
            f"needs {workers} GPUs, torch finds {torch.cuda.device_count()}",
        )
    scratch = Path(tempfile.mkdtemp(prefix="cudal1-fleet-"))
    try:
        rows = 4096 if args.devices == "gpu" else 256
        paths = write_tasks(
            scratch / "tasks", tasks, rows=rows, first_width=1024 if args.devices == "gpu" else 512
        )
        return _run(args, workers, paths, scratch, limit_s)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _make_command(
    args: argparse.Namespace, workers: int, paths: Sequence[Path], scratch: Path
) -> list[str]:
    device_options = (
        ["--devices", ",".join(map(str, range(workers)))]
        if args.devices == "gpu"
        else ["--device", "cpu", "--workers", str(workers)]
    )
    command = [sys.executable, "-m", "torch_cudal1", "warmup", *map(str, paths), *device_options]
    command += ["--cache-dir", str(scratch / "cache"), "--budget", str(args.budget_s), "--json"]
    if args.cores_per_device:
        cores = sorted(os.sched_getaffinity(0))[: workers * args.cores_per_device]
        command = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
    return command


def _run(
    args: argparse.Namespace, workers: int, paths: Sequence[Path], scratch: Path, limit_s: float
) -> WarmupRun:
    begin = time.monotonic()
    process = subprocess.Popen(
        _make_command(args, workers, paths, scratch),
        cwd=scratch,
        env=make_child_environment(scratch),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return WarmupRun(workers, len(paths), "failed", f"time limit of {limit_s:.0f} s")
    finally:
        kill_group(process)
    seconds = time.monotonic() - begin
    try:
        results: list[Mapping[str, Any]] = json.loads(output)["results"]
    except (ValueError, KeyError):
        last = (errors.strip().splitlines() or [""])[-1]
        reason = f"exit code {process.returncode}, no results: {last[:300]}"
        return WarmupRun(workers, len(paths), "failed", reason, seconds)
    return _summarise_results(results, workers, len(paths), seconds)


def _summarise_results(
    results: Sequence[Mapping[str, Any]], workers: int, tasks: int, seconds: float
) -> WarmupRun:
    judged = sum(result["built"] for result in results)
    wrong = next((result["error"] for result in results if result["error"]), "")
    if not wrong and len(results) != tasks:
        wrong = "a task is missing"
    elif not wrong and judged < tasks:
        wrong = (
            f"{judged} candidates were validated in {tasks} tasks, the others only timed their "
            "baselines: give it a larger --budget-s"
        )
    return WarmupRun(
        workers,
        tasks,
        "failed" if wrong else "ok",
        wrong[:300],
        seconds,
        None if wrong else tasks / seconds,
        judged,
        [result["seconds"] for result in results],
    )


def _format_run(run: WarmupRun) -> str:
    if run.tasks_per_s is None:
        return f"{run.workers} workers, {run.tasks} tasks: {run.status}: {run.reason}"
    steady = run.steady_tasks_per_s or 0.0
    return f"{run.workers} workers, {run.tasks} tasks: {run.seconds:.1f} s, {run.tasks_per_s:.3f} tasks/s (steady {steady:.3f})"


def _parser() -> argparse.ArgumentParser:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_fleet", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--devices", choices=("gpu", "cpu"), default="gpu" if gpu else "cpu")
    parser.add_argument(
        "--counts",
        type=_counts,
        default=(1, 2, 4) if gpu else (1, 2),
        help="workers of each run, such as 1,2,4",
    )
    parser.add_argument("--tasks-per-worker", type=int, default=4)
    parser.add_argument("--budget-s", type=float, default=4.0, help="the search budget per region")
    parser.add_argument(
        "--cores-per-device",
        type=int,
        default=0,
        help="give N workers N times this many cores; 0: all of them",
    )
    parser.add_argument("--time-limit-s", type=float, default=120.0, help="per run")
    parser.add_argument(
        "--total-limit-s",
        type=float,
        default=240.0,
        help="all runs; what does not fit is a row that says so",
    )
    parser.add_argument("--out", type=Path, default=_ROOT / "benchmarks" / "results" / "fleet.json")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected numbers of workers, such as 1,2,4")
    return counts


if __name__ == "__main__":
    sys.exit(main())
