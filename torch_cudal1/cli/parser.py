"""The whole command line as an argparse parser: every command, its function and its options.

The work is in `torch_cudal1.cli.commands`, one module a group, imported only when its command runs:
`cudal1 --help` never imports torch.
"""

from __future__ import annotations

import argparse

from torch_cudal1.cli import command_options, generate_options, options
from torch_cudal1.cli.command import Command, load_plugins
from torch_cudal1.core.version import __version__

__all__ = ["parser"]

_EPILOG = """\
TARGET is file.py:callable or package.module:callable returning (module, inputs), a KernelBench-style file (Model, get_inputs,
get_init_inputs), or a folder of those.

exit codes: 0 success; 1 a problem was found (verify: broken or refused entries; explain --fail-on-miss, coverage, lock:
regions without a decision; lock --check: a cache that differs; import: a bundle that breaks a rule;
push, pull: a file that was left out, refused or not received; keys list: an unusable list;
doctor: not usable; demo, warmup, plan, explain: a target failed); 2 wrong usage, setting or target; 130 interrupted.
judge: 0 valid and faster, 4 valid but not faster enough, 3 refused, 2 usage, or a reference that cannot be used.
import-kernels: one task as judge, 3 also if not lowerable; several 0, 1 if something could not be read.
generate: 0 a kernel was stored, 4 none is faster, 1 a task failed or the model gave no answer."""

# What every command takes that runs a module.
_RUN = (options.add_device, options.add_contract, options.add_cache, options.add_hub)
_COMMANDS = (
    Command(
        "demo",
        ".demo",
        "run",
        "accelerate a set of models on this machine and show the measured speed-ups",
        (command_options.add_demo, *_RUN),
    ),
    Command(
        "run",
        ".program.run",
        "run",
        "run a Python program, unmodified and accelerated, and report what it was worth",
        (options.add_contract, options.add_cache, options.add_hub, command_options.add_run),
    ),
    Command(
        "doctor",
        ".doctor",
        "run",
        "what this machine can do, what is missing and which settings hold",
        (options.add_cache,),
    ),
    Command(
        "warmup",
        ".models",
        "warmup",
        "fill the cache for TARGET ahead of time",
        (
            options.add_target,
            *_RUN,
            options.add_trust,
            options.add_search,
            options.add_training,
            options.add_recorded,
            command_options.add_with_inductor,
            command_options.add_workers,
            options.add_html,
        ),
    ),
    Command(
        "plan",
        ".models",
        "plan",
        "expected gain of TARGET before anything is built",
        (options.add_target, *_RUN, command_options.add_compare),
    ),
    Command(
        "explain",
        ".models",
        "explain",
        "what runs in TARGET, which candidates were validated, and why",
        (
            options.add_target,
            *_RUN,
            options.add_trust,
            options.add_search,
            command_options.add_explain,
            options.add_html,
        ),
    ),
    Command(
        "judge",
        ".judge",
        "run",
        "is a ModelNew correct, and faster than the fastest baseline of its Model",
        # No cache options: nothing that `judge` measures is stored.
        (command_options.add_judge, options.add_device),
    ),
    Command(
        "import-kernels",
        ".import_kernels",
        "import_kernels",
        "validate published kernels, lower and store them",
        (command_options.add_import_kernels, *_RUN, options.add_budget),
    ),
    Command(
        "export-kernels",
        ".import_kernels",
        "export_kernels",
        "write stored decisions for TARGET as FlashInfer-Trace files",
        (options.add_target, command_options.add_export_kernels, *_RUN),
    ),
    Command(
        "generate",
        ".generate",
        "run",
        "ask a language model for kernels and validate them",
        (generate_options.add, *_RUN),
    ),
    Command(
        "list",
        ".entries",
        "list_entries",
        "the entries of the cache",
        (
            options.add_trust,
            options.add_cache,
        ),
    ),
    Command(
        "show",
        ".entries",
        "show",
        "one entry with its evidence",
        (options.add_key, options.add_trust, options.add_cache),
    ),
    Command(
        "verify",
        ".entries",
        "verify",
        "read every entry: digests, Programs, signatures, revocations",
        (
            options.add_trust,
            options.add_cache,
        ),
    ),
    Command(
        "purge",
        ".purge",
        "purge",
        "delete entries",
        # No trust options: `purge` deletes an entry whether it is trusted or not.
        (command_options.add_purge, options.add_cache),
    ),
    Command(
        "push",
        ".hub_transfer",
        "push",
        "the entries of the cache into a Hub repository",
        (options.add_repository, command_options.add_push, options.add_families, options.add_cache),
    ),
    Command(
        "pull",
        ".hub_transfer",
        "pull",
        "the entries of a Hub repository here, at a pinned commit",
        # No trust options: each look-up decides what it may use of what was pulled.
        (options.add_repository, command_options.add_pull, options.add_cache),
    ),
    Command(
        "keys",
        ".signing",
        "keys",
        "make a signing key, or show which publishers this machine trusts",
        (command_options.add_keys, options.add_trust, options.add_cache),
    ),
    Command(
        "sign",
        ".signing",
        "sign",
        "sign the entries of the own cache",
        (command_options.add_sign, options.add_trust, options.add_cache),
    ),
    Command(
        "revoke",
        ".signing",
        "revoke",
        "add to the list of what must not be used any more",
        (command_options.add_revoke, options.add_trust, options.add_cache),
    ),
    Command(
        "lock",
        ".supply",
        "lock",
        "write or check cudal1.lock: what a cache must hold",
        (
            command_options.add_lock,
            options.add_families,
            options.add_training,
            options.add_recorded,
            options.add_trust,
            *_RUN,
        ),
    ),
    Command(
        "export",
        ".supply",
        "export",
        "entries for many machines as one file",
        (command_options.add_export, options.add_families, options.add_trust, options.add_cache),
    ),
    Command(
        "import",
        ".supply",
        "import_",
        "take a bundle in, beside the entries validated here",
        # No trust options: each look-up decides what it may use of a bundle.
        (command_options.add_import, options.add_cache),
    ),
    Command(
        "coverage",
        ".supply",
        "coverage",
        "what a deployment will have decided, from files",
        (
            command_options.add_coverage,
            options.add_families,
            options.add_training,
            options.add_recorded,
            options.add_trust,
            *_RUN,
        ),
    ),
)

# These commands have a --json of their own, which can also write a file.
_JSON_TO_FILE = ("judge", "import-kernels")


def parser() -> argparse.ArgumentParser:
    """The whole command line as an argparse parser."""
    command_line = argparse.ArgumentParser(
        prog="cudal1",
        description="Makes PyTorch models faster with validated kernels: never slower, never wrong, always explainable.",
        epilog=_EPILOG,
        # argparse would refill the table of exit codes into one paragraph.
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_argument("--version", action="version", version=f"torch-cudal1 {__version__}")
    # Required: argparse itself accepts a command line without a command.
    commands = command_line.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (*_COMMANDS, *load_plugins()):
        subparser = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.summary,
            # Exit codes are in the help of every command, where the author of a script looks.
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for add_options in command.options:
            add_options(subparser)
        if command.name not in _JSON_TO_FILE:
            subparser.add_argument(
                "--json", action="store_true", help="one JSON value on stdout instead of text"
            )
        subparser.add_argument("--quiet", action="store_true", help="no progress")
        subparser.add_argument(
            # Expected errors show one paragraph; a bug report needs the rest.
            "--traceback",
            action="store_true",
            help="show the Python traceback of an error",
        )
        # The module is imported from this record when the command runs.
        subparser.set_defaults(run=command)
    return command_line
