"""The options of the command line, command by command. What a command does is in `__main__`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.kernelbench.ablation import ARMS
from benchmarks.kernelbench.job import LABELS, PROFILES
from benchmarks.kernelbench.tasks import LEVELS

__all__ = ["make_parser"]


def make_parser(
    description: str | None, actions: Mapping[str, Callable[[argparse.Namespace], int]]
) -> argparse.ArgumentParser:
    """The parser; a parsed command has its function of `actions` as `action`."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernelbench", description=description)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="measure; goes on where FILE.jsonl ends")
    _add_task_options(run)
    _add_column_options(run)
    _add_limit_options(run)
    _add_process_options(run)
    run.set_defaults(action=actions["run"])
    report = commands.add_parser("report", help="tables and a page from one or more FILE.jsonl")
    _add_report_options(report)
    report.set_defaults(action=actions["report"])
    products = commands.add_parser(
        "plan", help="the kernels that would be tried for each matrix product; needs no GPU"
    )
    _add_plan_options(products)
    products.set_defaults(action=actions["plan"])
    ahead = commands.add_parser(
        "compile", help="compile those kernels ahead, for a run with the same --work; needs no GPU"
    )
    _add_compile_options(ahead)
    ahead.set_defaults(action=actions["compile"])
    return parser


def _add_task_options(run: argparse.ArgumentParser) -> None:
    """Which tasks, and where their rows go."""
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


def _add_column_options(run: argparse.ArgumentParser) -> None:
    """What is measured of every task: the fields of `Job`."""
    cuda = torch.cuda.is_available()
    run.add_argument("--profile", choices=PROFILES, default="quick")
    run.add_argument(
        "--rights",
        choices=LABELS,
        default="default",
        help="precision of all columns; " + "; ".join(LABELS.values()),
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


def _add_limit_options(run: argparse.ArgumentParser) -> None:
    """How long things may take."""
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


def _add_process_options(run: argparse.ArgumentParser) -> None:
    """How the processes of tasks are run."""
    cores = len(os.sched_getaffinity(0))
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


def _add_report_options(report: argparse.ArgumentParser) -> None:
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


def _add_plan_options(products: argparse.ArgumentParser) -> None:
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


def _add_compile_options(ahead: argparse.ArgumentParser) -> None:
    ahead.add_argument("tasks", metavar="TASKS", help="as for run")
    ahead.add_argument("--work", type=Path, default=Path("kernelbench-work"))
    ahead.add_argument("--level", type=int, nargs="+", choices=LEVELS, default=list(LEVELS))
    ahead.add_argument("--only", nargs="+", default=[], metavar="LEVEL/NUMBER")
    ahead.add_argument("--rights", choices=LABELS, default="default", help="as for run")
    ahead.add_argument("--sm", type=int, default=90, metavar="NUMBER")
    ahead.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    ahead.add_argument("--budget-s", type=float, default=600.0)


def _parse_shard(text: str) -> tuple[int, int]:
    at, _, of = text.partition("/")
    if not (at.isdigit() and of.isdigit() and int(at) < int(of)):
        raise argparse.ArgumentTypeError(f"{text!r}; expected I/N with 0 <= I < N, such as 0/4")
    return int(at), int(of)
