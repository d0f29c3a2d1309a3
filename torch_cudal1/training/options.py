"""The options of the command `cudal1 train`, which the command line finds by an entry point. Its
work is in `training.command`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_cudal1.cli.command import Command

__all__ = ["COMMAND", "add_options"]

_ACTIONS = ("collect", "sft", "selfsup", "rl", "demo", "report", "experiment")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the action and all option groups to a parser."""
    # The command line imports this module to build its parser; the work, and its imports, are in
    # `training.command`.
    parser.add_argument(
        "action",
        choices=_ACTIONS,
        help="a stage; demo: all of them, small; experiment: the arms of a plan; report: a page",
    )
    _add_run_options(parser)
    _add_reward_options(parser.add_argument_group("where rewards come from"))
    _add_policy_options(parser.add_argument_group("who writes"))
    _add_plan_options(parser.add_argument_group("experiments"))


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run",
        dest="run_folder",
        type=Path,
        default=Path("cudal1-train"),
        metavar="DIR",
        help="its folder (./cudal1-train)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("cudal1-train.html"),
        metavar="PATH",
        help="the page (./cudal1-train.html)",
    )
    parser.add_argument("--resume", action="store_true", help="go on with a stage that was begun")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings of a new run as JSON, in the form of a run's run.json",
    )
    parser.add_argument(
        # Options of a run have no default here: None means "as the run began", and for a new run
        # the default of its settings, which the help names in brackets.
        "--seed",
        type=int,
        metavar="N",
        help="of models, samples and draws (0); of a plan: that one only",
    )


def _add_reward_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--landscape",
        metavar="FILE",
        help="replay of measurements (the CPU landscape of the package)",
    )
    # Measuring runs foreign code in a sandbox and occupies the device, so it is never the default.
    group.add_argument("--live", action="store_true", help="measure on this machine")
    group.add_argument("--device", choices=("cpu", "cuda"), help="with --live: where (cpu)")
    group.add_argument(
        "--lanes",
        type=int,
        metavar="N",
        help="with --live: programs that are validated side by side (1)",
    )
    group.add_argument(
        "--tasks",
        metavar="FOLDER",
        help="with --live: KernelBench-style files for a language model",
    )


def _add_policy_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        metavar="FOLDER|NAME",
        help="a causal language model to begin with (a small one from nothing)",
    )
    group.add_argument(
        "--generator",
        metavar="URL|FOLDER",
        # Repeatable: several independent generators make better data than one (section 2.2 of the
        # paper has six).
        action="append",
        default=[],
        help="collect: server or model to ask; repeatable",
    )
    group.add_argument(
        "--selector",
        choices=("none", "random", "bucket", "island", "top"),
        help="rl: which programs a prompt shows (bucket)",
    )
    group.add_argument("--steps", type=int, metavar="N", help="rl: steps of a new run (100)")


def _add_plan_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="arms, seeds and sizes, written down before the first run",
    )
    group.add_argument(
        "--workers", type=int, metavar="N", help="runs at the same time, one thread each"
    )
    group.add_argument(
        "--budget-s",
        dest="total_s",
        type=float,
        metavar="S",
        help="end after so many seconds; the same command goes on",
    )


# Found by an entry point and imported by name when it runs, so that the command line does not
# depend on this package's extras.
COMMAND = Command(
    "train",
    "torch_cudal1.training.command",
    "run",
    "teach a model to write kernels, in stages; needs the extra train",
    (add_options,),
)
