"""Option groups that several commands share: each function adds a few arguments to a parser.

It imports nothing heavy: every command line, `cudal1 --help` included, builds its parser from here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = [
    "add_budget",
    "add_cache",
    "add_contract",
    "add_device",
    "add_families",
    "add_html",
    "add_hub",
    "add_key",
    "add_recorded",
    "add_repository",
    "add_search",
    "add_target",
    "add_training",
    "add_trust",
    "parse_seconds",
]


def parse_seconds(text: str) -> float:
    """A number of seconds above 0. Raises ArgumentTypeError for anything else."""
    # `float` raises ValueError, which argparse turns into a usage error with exit code 2.
    value = float(text)
    # `float` accepts "nan" and "inf", and a budget of either would never end. NaN fails every
    # comparison.
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds TARGET, one or more."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="+",
        help="what to work on; several are done one after another",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds --device."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where to run; default: cuda if torch sees a GPU, else cpu",
    )


def add_contract(parser: argparse.ArgumentParser) -> None:
    """Adds --precision and --assume-finite."""
    parser.add_argument(
        "--precision",
        choices=("match", "strict", "kernelbench"),
        help="how accurate a replacement must be",
    )
    parser.add_argument(
        "--assume-finite",
        action="store_true",
        # None, not False: only what the user gave overrides the setting from the environment.
        default=None,
        help="admit rewrites right only without NaN/inf",
    )


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Adds --cache-dir and --offline."""
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="default: TORCH_CUDAL1_CACHE_DIR or ~/.cache/torch_cudal1",
    )
    parser.add_argument(
        "--offline",
        action="store_true",
        # As above: a missing flag must not switch off what TORCH_CUDAL1_OFFLINE says.
        default=None,
        help="open no connection, whatever the settings say",
    )


def add_hub(parser: argparse.ArgumentParser) -> None:
    """Adds --hub."""
    parser.add_argument(
        # A commit as REVISION pins what is fetched; a branch may change between two starts.
        "--hub",
        metavar="REPO[@REVISION]",
        help="a Hub repository that is asked for what the cache lacks",
    )


def add_budget(parser: argparse.ArgumentParser) -> None:
    """Adds --budget, seconds of search per region."""
    parser.add_argument(
        "--budget",
        # The name of the setting, so that `cli.main` passes it on.
        dest="budget_s",
        type=parse_seconds,
        metavar="SECONDS",
        help="search time per region",
    )


def add_search(parser: argparse.ArgumentParser) -> None:
    """Adds --budget and --on-miss."""
    add_budget(parser)
    parser.add_argument(
        "--on-miss",
        choices=("quick", "baseline", "tune", "error"),
        help="what a region without a stored decision gets",
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds --publishers, --revoked and --trust."""
    parser.add_argument(
        "--publishers",
        type=Path,
        metavar="PATH",
        help="the list of publishers whose signature is accepted (TOML)",
    )
    parser.add_argument(
        "--revoked",
        type=Path,
        metavar="PATH",
        help="the list of what must not be used any more (TOML)",
    )
    parser.add_argument(
        # Only for entries from outside the cache: what was validated on this machine needs no
        # signature.
        "--trust",
        # "judge": validated again where a search is allowed. "signed": never used without a
        # signature.
        choices=("judge", "signed"),
        help="what an unsigned entry from outside the cache gets (judge)",
    )


def add_training(parser: argparse.ArgumentParser) -> None:
    """Adds --training."""
    parser.add_argument(
        "--training",
        action="store_true",
        help="tune forward and backward instead of inference",
    )


def add_recorded(parser: argparse.ArgumentParser) -> None:
    """Adds --recorded."""
    parser.add_argument(
        # The target's own inputs are one guess of a batch size; a recording has those that were
        # served.
        "--recorded",
        type=Path,
        metavar="FILE",
        help="take the calls of TARGET in this recording, not TARGET's own",
    )


def add_families(parser: argparse.ArgumentParser) -> None:
    """Adds --family."""
    parser.add_argument(
        "--family",
        metavar="FAMILY",
        action="append",
        # argparse copies this list before it appends, so commands do not share it.
        default=[],
        help="only this one, such as cuda-sm_90; repeatable",
    )


def add_key(parser: argparse.ArgumentParser) -> None:
    """Adds KEY."""
    parser.add_argument("key", metavar="KEY", help="a region's key, or enough of its start")


def add_repository(parser: argparse.ArgumentParser) -> None:
    """Adds REPO[@REVISION]."""
    parser.add_argument(
        "repo",
        metavar="REPO[@REVISION]",
        help="owner/name of a repository on the Hub; default revision: main",
    )


def add_html(parser: argparse.ArgumentParser) -> None:
    """Adds --html."""
    parser.add_argument(
        # Self-contained: inline CSS and SVG, no script, and no request to the network.
        "--html",
        type=Path,
        metavar="PATH",
        help="also write the answer as a self-contained HTML page",
    )
