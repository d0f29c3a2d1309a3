"""The command line: `cudal1 COMMAND`, also `python -m torch_cudal1 COMMAND`. It reads arguments and
turns outcomes into exit codes.

The work is in `torch_cudal1.cli.commands`, one module a group, imported only when its command runs:
`cudal1 --help` never imports torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_cudal1.cli.command import Command, load_plugins
from torch_cudal1.cli.commands import generate_options
from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.errors import Cudal1Error, SettingError, TargetError
from torch_cudal1.core.settings import Settings
from torch_cudal1.core.version import __version__

__all__ = ["main"]

FOUND_WRONG, USAGE, INTERRUPTED = 1, 2, 130

_EPILOG = """\
TARGET is file.py:callable or package.module:callable returning (module, inputs), a KernelBench-style file (Model, get_inputs,
get_init_inputs), or a folder of those.

exit codes: 0 all well; 1 something was found wrong (verify: broken or refused entries; explain --fail-on-miss, coverage, lock:
regions without a decision; lock --check: a cache that differs; import: a bundle that breaks a rule;
push, pull: a file that was left out, was refused or did not come; keys list: an unusable list;
doctor: not usable; demo, warmup, plan, explain: a target failed); 2 wrong usage, setting or target; 130 interrupted.
judge: 0 valid and faster, 4 valid but not faster enough, 3 refused, 2 usage, or a reference that cannot be used.
import-kernels: one task as judge, 3 also if not lowerable; several 0, 1 if something could not be read.
generate: 0 a kernel was stored, 4 none is faster, 1 a task failed or the model gave no answer."""


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="+",
        help="what to work on; several are done one after another",
    )


def _page(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--html",
        type=Path,
        metavar="PATH",
        help="also write the answer as a self-contained HTML page",
    )


def _device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where to run; default: cuda if torch sees a GPU, else cpu",
    )


def _contract(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        choices=("match", "strict", "kernelbench"),
        help="how accurate a replacement must be",
    )
    parser.add_argument(
        "--assume-finite",
        action="store_true",
        default=None,
        help="admit rewrites right only without NaN/inf",
    )


def _budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget", dest="budget_s", type=_seconds, metavar="SECONDS", help="search time per region"
    )


def _search(parser: argparse.ArgumentParser) -> None:
    _budget(parser)
    parser.add_argument(
        "--on-miss",
        choices=("baseline", "tune", "error"),
        help="what a region without a stored decision gets",
    )


def _cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="default: TORCH_CUDAL1_CACHE_DIR or ~/.cache/torch_cudal1",
    )
    parser.add_argument(
        "--offline",
        action="store_true",
        default=None,
        help="open no connection, whatever the settings say",
    )


def _hub(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hub",
        metavar="REPO[@REVISION]",
        help="a Hub repository that is asked for what the cache lacks",
    )


def _repo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "repo",
        metavar="REPO[@REVISION]",
        help="owner/name of a repository on the Hub; default revision: main",
    )


def _push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--create", action="store_true", help="make the repository, private, if it is not there"
    )
    parser.add_argument(
        "--message", default="Entries of torch-cudal1", metavar="TEXT", help="the commit's message"
    )


def _pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--family",
        metavar="FAMILY",
        action="append",
        default=[],
        help="such as cuda-sm_90, or all; repeatable; default: this machine's",
    )


def _demo(parser: argparse.ArgumentParser) -> None:
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
        dest="total_s",
        type=_seconds,
        default=225.0,
        metavar="S",
        help="for the whole demo (225)",
    )


def _explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fail-on-miss", action="store_true", help="exit with 1 if a region has no stored decision"
    )


def _compare(parser: argparse.ArgumentParser) -> None:
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


def _ahead(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--with-inductor",
        action="store_true",
        help="also store what Inductor compiles, for machines without compiler",
    )


def _crew(parser: argparse.ArgumentParser) -> None:
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--devices",
        metavar="all|N,M",
        help="one worker for each of these GPUs; what is finished is not done again",
    )
    one.add_argument("--workers", type=_count, metavar="N", help="that many workers on the CPU")
    one.add_argument(
        "--cluster",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="workers of a Ray cluster (extra: ray)",
    )


def _recorded(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recorded",
        type=Path,
        metavar="FILE",
        help="take the calls of TARGET in this recording, not TARGET's own",
    )


def _training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--training", action="store_true", help="tune forward and backward instead of inference"
    )


def _key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEY", help="a region's key, or enough of its start")


def _purge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
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
    sure = parser.add_mutually_exclusive_group()
    sure.add_argument(
        "--yes", action="store_true", help="do it; without this, only say what would go"
    )
    sure.add_argument(
        "--dry-run", action="store_true", help="only say what would go, as without --yes"
    )


def _families(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--family",
        metavar="FAMILY",
        action="append",
        default=[],
        help="only this one, such as cuda-sm_90; repeatable",
    )


def _lock(parser: argparse.ArgumentParser) -> None:
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


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="the file to write")
    parser.add_argument(
        "key", metavar="KEY", nargs="*", help="keys, or starts of them; without any: everything"
    )
    parser.add_argument(
        "--lock", type=Path, metavar="PATH", help="exactly what this lock names, or nothing"
    )


def _import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="a file of `cudal1 export`")


def _coverage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="WHAT", nargs="+", help="TARGETs, and locks (names that end with .lock)"
    )
    parser.add_argument(
        "--sku",
        metavar="NAME",
        help="the GPU or CPU model there, such as 'NVIDIA H200'; default: any",
    )
    parser.add_argument("--torch", metavar="VERSION", help="the torch there; default: any")


def _import_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="+",
        type=Path,
        help="release file, file with ModelNew, or folder of kernels",
    )
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="REF",
        help="file or folder with Model, get_inputs, get_init_inputs",
    )
    parser.add_argument(
        "--level", type=int, metavar="N", help="only tasks of this level of a release file"
    )
    parser.add_argument("--limit", type=_count, metavar="N", help="only the first N of those tasks")
    parser.add_argument(
        "--json",
        nargs="?",
        const=True,
        default=False,
        type=Path,
        metavar="OUT",
        help="results as JSON: to a file, or to stdout",
    )


def _export_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("flashinfer-trace"),
        metavar="DIR",
        help="where to (./flashinfer-trace)",
    )


def _trust(parser: argparse.ArgumentParser) -> None:
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
        "--trust",
        choices=("judge", "signed"),
        help="what an unsigned entry from outside the cache gets (judge)",
    )


def _keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
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


def _sign(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "keyfile", metavar="KEYFILE", type=Path, help="the private key of `cudal1 keys new`"
    )
    parser.add_argument(
        "key",
        metavar="KEY",
        nargs="*",
        help="keys, or starts of them; without any: everything, aliases too",
    )


def _revoke(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="WHAT",
        nargs="+",
        help="a region's key or its start, entry:DIGEST, program:DIGEST, or ed25519:PUBLICKEY",
    )
    parser.add_argument(
        "--reason", required=True, metavar="TEXT", help="why, for whoever meets the refusal"
    )


def _judge(parser: argparse.ArgumentParser) -> None:
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
        help="judge every line of a CUDA-L1 release file instead",
    )
    parser.add_argument(
        "--level", type=int, metavar="N", help="with --release: only tasks of this level"
    )
    parser.add_argument(
        "--limit", type=_count, metavar="N", help="with --release: only the first N of those lines"
    )
    parser.add_argument(
        "--profile",
        choices=("fast", "standard", "strict", "train", "cudal1"),
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


_RUN = (_device, _contract, _cache, _hub)
_COMMANDS = (
    Command(
        "demo",
        ".demo",
        "run",
        "accelerate a set of models on this machine and show what came of it",
        (_demo, *_RUN),
    ),
    Command(
        "doctor",
        ".doctor",
        "run",
        "what this machine can do, what is missing and which settings hold",
        (_cache,),
    ),
    Command(
        "warmup",
        ".models",
        "warmup",
        "fill the cache for TARGET ahead of time",
        (_target, *_RUN, _trust, _search, _training, _recorded, _ahead, _crew, _page),
    ),
    Command(
        "plan",
        ".models",
        "plan",
        "expected gain of TARGET before anything is built",
        (_target, *_RUN, _compare),
    ),
    Command(
        "explain",
        ".models",
        "explain",
        "what runs in TARGET, what was tried, why",
        (_target, *_RUN, _trust, _search, _explain, _page),
    ),
    Command(
        "judge",
        ".judge",
        "run",
        "is a ModelNew right, and faster than the best way to run its Model",
        (_judge, _device),
    ),
    Command(
        "import-kernels",
        ".published",
        "import_kernels",
        "judge kernels that others published, lower and store them",
        (_import_kernels, *_RUN, _budget),
    ),
    Command(
        "export-kernels",
        ".published",
        "export_kernels",
        "write stored decisions for TARGET as FlashInfer-Trace files",
        (_target, _export_kernels, *_RUN),
    ),
    Command(
        "generate",
        ".generate",
        "run",
        "ask a language model for kernels and judge them",
        (generate_options.add, *_RUN),
    ),
    Command(
        "list",
        ".entries",
        "list_entries",
        "the entries of the cache",
        (
            _trust,
            _cache,
        ),
    ),
    Command("show", ".entries", "show", "one entry with its evidence", (_key, _trust, _cache)),
    Command(
        "verify",
        ".entries",
        "verify",
        "read every entry: digests, Programs, signatures, revocations",
        (
            _trust,
            _cache,
        ),
    ),
    Command("purge", ".entries", "purge", "delete entries", (_purge, _cache)),
    Command(
        "push",
        ".hub",
        "push",
        "the entries of the cache into a Hub repository",
        (_repo, _push, _families, _cache),
    ),
    Command(
        "pull",
        ".hub",
        "pull",
        "the entries of a Hub repository here, at a pinned commit",
        (_repo, _pull, _cache),
    ),
    Command(
        "keys",
        ".trust",
        "keys",
        "make a signing key, or show whom this machine trusts",
        (_keys, _trust, _cache),
    ),
    Command("sign", ".trust", "sign", "sign the entries of the own cache", (_sign, _trust, _cache)),
    Command(
        "revoke",
        ".trust",
        "revoke",
        "add to the list of what must not be used any more",
        (_revoke, _trust, _cache),
    ),
    Command(
        "lock",
        ".supply",
        "lock",
        "write or check cudal1.lock: what a cache must hold",
        (_lock, _families, _training, _recorded, _trust, *_RUN),
    ),
    Command(
        "export",
        ".supply",
        "export",
        "entries for many machines as one file",
        (_export, _families, _trust, _cache),
    ),
    Command(
        "import",
        ".supply",
        "import_",
        "take a bundle in, beside the entries judged here",
        (_import, _cache),
    ),
    Command(
        "coverage",
        ".supply",
        "coverage",
        "what a deployment will have decided, from files",
        (_coverage, _families, _training, _recorded, _trust, *_RUN),
    ),
)
_SETTINGS = (
    "precision",
    "assume_finite",
    "budget_s",
    "on_miss",
    "cache_dir",
    "offline",
    "hub",
    "trust",
    "publishers",
    "revoked",
)


def parser() -> argparse.ArgumentParser:
    """The whole command line as an argparse parser."""
    made = argparse.ArgumentParser(
        prog="cudal1",
        description="Makes PyTorch models faster with validated kernels: never slower, never wrong, always explainable.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"torch-cudal1 {__version__}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (*_COMMANDS, *load_plugins()):
        sub = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.summary,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for add in command.options:
            add(sub)
        if command.name not in ("judge", "import-kernels"):  # which can also write a file
            sub.add_argument(
                "--json", action="store_true", help="one JSON value on stdout instead of text"
            )
        sub.add_argument("--quiet", action="store_true", help="no progress")
        sub.add_argument(
            "--traceback", action="store_true", help="show the Python traceback of an error"
        )
        sub.set_defaults(run=command)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Raises SystemExit only as argparse does
    (--help, wrong arguments).
    """
    args = parser().parse_args(argv)
    screen = Screen(as_json=args.json is True, quiet=args.quiet)
    try:
        return _run(args, screen)
    except KeyboardInterrupt:
        screen.problem("interrupted; finished entries are kept")
        return INTERRUPTED
    except BrokenPipeError:  # `cudal1 list | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND_WRONG
    except (Cudal1Error, OSError) as error:
        if args.traceback:
            raise
        screen.problem(text.of_error(error))
        return USAGE if isinstance(error, (SettingError, TargetError, OSError)) else FOUND_WRONG


def _run(args: argparse.Namespace, screen: Screen) -> int:
    given = {name: value for name in _SETTINGS if (value := getattr(args, name, None)) is not None}
    settings = Settings.from_env(**given)
    module = importlib.import_module(args.run.module, "torch_cudal1.cli.commands")
    code = getattr(module, args.run.function)(args, settings, screen)
    if not isinstance(code, int):
        raise TypeError(f"command {args.command!r} answered {code!r}; expected an exit code")
    return code


if __name__ == "__main__":
    sys.exit(main())
