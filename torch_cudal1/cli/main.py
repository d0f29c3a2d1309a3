"""Runs one command line: parses it, calls the command, turns its outcome into an exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from torch_cudal1.cli.parser import parser
from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.errors import Cudal1Error, SettingError, TargetError
from torch_cudal1.core.settings import Settings

__all__ = ["main"]

# 2 is what argparse exits with; 130 is what a shell reports for a process that SIGINT ended.
_FOUND_WRONG, _USAGE, _INTERRUPTED = 1, 2, 130

# Options that set the field of `Settings` of the same name. An option that was not given is None,
# so that a variable of the environment still counts.
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Raises SystemExit only as argparse does
    (--help, wrong arguments).
    """
    args = parser().parse_args(argv)
    screen = Screen(as_json=args.json is True, quiet=args.quiet)
    try:
        return _run_command(args, screen)
    # Entries are written one by one, so what is finished stays.
    except KeyboardInterrupt:
        screen.problem("interrupted; finished entries are kept")
        return _INTERRUPTED
    except BrokenPipeError:
        # `cudal1 list | head`: the reader closed the pipe. Python would report the same error once
        # more when it flushes stdout at exit, so stdout goes to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FOUND_WRONG
    except (Cudal1Error, OSError) as error:
        # Expected errors are one paragraph; a bug is any other exception and keeps its traceback.
        if args.traceback:
            raise
        screen.problem(text.of_error(error))
        # A wrong path, setting or target is the user's to mend (2); any other failure of this
        # package was found while it worked (1).
        return _USAGE if isinstance(error, (SettingError, TargetError, OSError)) else _FOUND_WRONG


def _run_command(args: argparse.Namespace, screen: Screen) -> int:
    fields = {name: value for name in _SETTINGS if (value := getattr(args, name, None)) is not None}
    settings = Settings.from_env(**fields)
    # Only the module of this command is imported: most of a short command's time is imports.
    module = importlib.import_module(args.run.module, "torch_cudal1.cli.commands")
    code = getattr(module, args.run.function)(args, settings, screen)
    # A command that returned None would exit with 0, as if all were well.
    if not isinstance(code, int):
        raise TypeError(f"command {args.command!r} answered {code!r}; expected an exit code")
    return code
