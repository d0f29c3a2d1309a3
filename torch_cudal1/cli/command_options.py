"""Option groups that belong to one command each; groups that commands share are in `cli.options`.

It imports nothing heavy: every command line builds its parser from here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_cudal1.cli.options import parse_seconds

__all__ = [
    "add_compare",
    "add_coverage",
    "add_demo",
    "add_explain",
    "add_export",
    "add_export_kernels",
    "add_import",
    "add_import_kernels",
    "add_judge",
    "add_keys",
    "add_lock",
    "add_pull",
    "add_purge",
    "add_push",
    "add_revoke",
    "add_run",
    "add_sign",
    "add_with_inductor",
    "add_workers",
]


def add_push(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 push`."""
    parser.add_argument(
        # Private, and only on demand: a misspelt name must not publish entries under a new
        # repository.
        "--create",
        action="store_true",
        help="make the repository, private, if it is not there",
    )
    parser.add_argument(
        "--message", default="Entries of torch-cudal1", metavar="TEXT", help="the commit's message"
    )


def add_pull(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 pull`."""
    parser.add_argument(
        # Repeatable: a fleet may have several GPU types.
        "--family",
        metavar="FAMILY",
        action="append",
        default=[],
        help="such as cuda-sm_90, or all; repeatable; default: this machine's",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 run`: what belongs to the program comes after its name."""
    parser.add_argument(
        "-m",
        dest="as_module",
        action="store_true",
        help="PROGRAM is a module's name, as with python -m",
    )
    parser.add_argument(
        "--on-miss",
        choices=("quick", "baseline", "tune", "error"),
        help="what a region without a stored decision gets (quick)",
    )
    parser.add_argument("program", metavar="PROGRAM", help="a Python file, or with -m a module")
    parser.add_argument(
        "arguments",
        metavar="ARGUMENT",
        nargs=argparse.REMAINDER,
        help="the program's own arguments",
    )


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 demo`."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("cudal1-demo.html"),
        metavar="PATH",
        help="the page (./cudal1-demo.html)",
    )
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        default=[],
        help="only this model; may be repeated",
    )
    parser.add_argument(
        "--budget-s",
        # Not `budget_s`, which is a setting: search time for one region.
        dest="total_s",
        type=parse_seconds,
        # A little under four minutes, as `make demo` promises: compiling for the comparison comes
        # on top.
        default=225.0,
        metavar="S",
        help="for the whole demo (225)",
    )


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 explain`."""
    parser.add_argument(
        # For build pipelines: an image with a cold cache must not be shipped.
        "--fail-on-miss",
        action="store_true",
        help="exit with 1 if a region has no stored decision",
    )


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 plan`."""
    parser.add_argument(
        "--compare",
        action="store_true",
        help="what a call costs on each GPU type with decisions in the cache",
    )
    parser.add_argument(
        "--recorded",
        type=Path,
        metavar="FILE",
        help="with --compare: weigh by the calls in this file",
    )
    parser.add_argument(
        "--prices",
        type=Path,
        metavar="FILE",
        help="with --compare: JSON of prices and watts by GPU name",
    )


def add_with_inductor(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 warmup`."""
    parser.add_argument(
        # Off by default: files of a compiler are native code, which another machine runs only if a
        # publisher whom it trusts has signed them.
        "--with-inductor",
        action="store_true",
        help="also store what Inductor compiles, for machines without compiler",
    )


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 warmup`."""
    # A run has one pool of workers, and each of these options makes one.
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument(
        "--devices",
        metavar="all|N,M",
        help="one worker for each of these GPUs; a target that is finished is not done again",
    )
    pool.add_argument(
        # CPU workers disturb each other's timings, so the number is the user's choice and has no
        # default.
        "--workers",
        type=_parse_count,
        metavar="N",
        help="that many workers on the CPU",
    )
    pool.add_argument(
        "--cluster",
        nargs="?",
        # Without an address Ray finds its own cluster.
        const="auto",
        metavar="ADDRESS",
        help="workers of a Ray cluster (extra: ray)",
    )


def add_purge(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 purge`."""
    parser.add_argument(
        # Nothing named means everything, so --yes is needed before anything is deleted.
        "key",
        metavar="KEY",
        nargs="*",
        help="keys, or starts of them; without any: everything (needs --yes)",
    )
    parser.add_argument("--broken", action="store_true", help="only entries that cannot be read")
    parser.add_argument(
        "--quarantined",
        action="store_true",
        help="no entries: only let quarantined ones (of KEY) run again",
    )
    parser.add_argument(
        "--unused",
        action="store_true",
        help="only old folders: replaced imports, Hub commits without a pin, other versions' kernels",
    )
    # Deleting needs an explicit yes; the default only lists.
    confirmation = parser.add_mutually_exclusive_group()
    confirmation.add_argument(
        "--yes", action="store_true", help="do it; without this, only list what would be deleted"
    )
    confirmation.add_argument(
        "--dry-run", action="store_true", help="only list what would be deleted, as without --yes"
    )


def add_lock(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 lock`."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="*",
        help="only what these need; without any: everything in the cache",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare the lock with the cache instead; 1 if they differ",
    )
    parser.add_argument(
        "--lock",
        type=Path,
        default=Path("cudal1.lock"),
        metavar="PATH",
        help="the lock (./cudal1.lock)",
    )


def add_export(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 export`."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="the file to write")
    parser.add_argument(
        "key", metavar="KEY", nargs="*", help="keys, or starts of them; without any: everything"
    )
    parser.add_argument(
        # All or nothing: a bundle that lacks a pinned entry would look complete.
        "--lock",
        type=Path,
        metavar="PATH",
        help="exactly what this lock names, or nothing",
    )


def add_import(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 import`."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="a file of `cudal1 export`")


def add_coverage(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 coverage`."""
    parser.add_argument(
        # `supply.coverage` reads a name that ends with .lock as a lock.
        "target",
        metavar="WHAT",
        nargs="+",
        help="TARGETs, and locks (names that end with .lock)",
    )
    parser.add_argument(
        "--sku",
        metavar="NAME",
        help="the GPU or CPU model there, such as 'NVIDIA H200'; default: any",
    )
    parser.add_argument("--torch", metavar="VERSION", help="the torch there; default: any")


def add_import_kernels(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 import-kernels`."""
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="+",
        type=Path,
        help="release file, file with ModelNew, or folder of kernels",
    )
    parser.add_argument(
        # Not needed for release files, whose lines hold both sources.
        "--reference",
        type=Path,
        metavar="REF",
        help="file or folder with Model, get_inputs, get_init_inputs",
    )
    parser.add_argument(
        "--level", type=int, metavar="N", help="only tasks of this level of a release file"
    )
    parser.add_argument(
        "--limit", type=_parse_count, metavar="N", help="only the first N of those tasks"
    )
    parser.add_argument(
        "--json",
        nargs="?",
        # `--json` alone is stdout (True), with a path it is a file.
        const=True,
        default=False,
        type=Path,
        metavar="OUT",
        help="results as JSON: to a file, or to stdout",
    )


def add_export_kernels(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 export-kernels`."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("flashinfer-trace"),
        metavar="DIR",
        help="where to (./flashinfer-trace)",
    )


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 keys`."""
    parser.add_argument(
        "action",
        # No action adds to the list of publishers: whom a machine trusts is decided in an editor.
        choices=("new", "list"),
        help="new: a key pair for NAME; list: both lists as they hold now",
    )
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="the publisher, such as platform-team"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="the private key's file (~/.config/torch_cudal1/keys/NAME.pem)",
    )


def add_sign(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 sign`."""
    parser.add_argument(
        "keyfile", metavar="KEYFILE", type=Path, help="the private key of `cudal1 keys new`"
    )
    parser.add_argument(
        "key",
        metavar="KEY",
        nargs="*",
        help="keys, or starts of them; without any: everything, decision records too",
    )


def add_revoke(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 revoke`."""
    parser.add_argument(
        "what",
        metavar="WHAT",
        nargs="+",
        help="a region's key or its start, entry:DIGEST, program:DIGEST, or ed25519:PUBLICKEY",
    )
    parser.add_argument(
        # Required: the reason is all that a user sees where an entry is refused later.
        "--reason",
        required=True,
        metavar="TEXT",
        help="why; shown where the entry is refused",
    )


def add_judge(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cudal1 judge`."""
    parser.add_argument(
        "reference",
        metavar="REFERENCE",
        nargs="?",
        type=Path,
        help="file with Model, get_inputs, get_init_inputs",
    )
    parser.add_argument(
        "candidate", metavar="CANDIDATE", nargs="?", type=Path, help="file with ModelNew"
    )
    parser.add_argument(
        "--release",
        type=Path,
        metavar="FILE",
        help="validate every line of a CUDA-L1 release file instead",
    )
    parser.add_argument(
        "--level", type=int, metavar="N", help="with --release: only tasks of this level"
    )
    parser.add_argument(
        "--limit",
        type=_parse_count,
        metavar="N",
        help="with --release: only the first N of those lines",
    )
    parser.add_argument(
        "--profile",
        choices=("fast", "standard", "strict", "train", "cudal1"),
        # The shortest profile, since `judge` stores nothing.
        default="fast",
        help="how much is tested (fast)",
    )
    parser.add_argument(
        "--contract",
        dest="precision",
        choices=("match", "strict", "kernelbench"),
        help="how accurate it must be",
    )
    parser.add_argument("--inference", action="store_true", help="do not ask for gradients")
    parser.add_argument(
        "--json",
        nargs="?",
        const=True,
        default=False,
        type=Path,
        metavar="OUT",
        help="result as JSON: to a file, or to stdout",
    )


def _parse_count(text: str) -> int:
    # `int` raises ValueError, which argparse turns into a usage error with exit code 2.
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value
