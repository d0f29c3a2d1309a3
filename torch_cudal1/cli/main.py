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

_FOUND_WRONG, _USAGE, _INTERRUPTED = 1, 2, 130

# options that set the field of `Settings` of the same name
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
    except KeyboardInterrupt:
        screen.problem("interrupted; finished entries are kept")
        return _INTERRUPTED
    except BrokenPipeError:
        # `cudal1 list | head`: the reader closed the pipe. Python would report the same error once
        # more when it flushes stdout at exit, so stdout goes to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FOUND_WRONG
    except (Cudal1Error, OSError) as error:
        if args.traceback:
            raise
        screen.problem(text.of_error(error))
        return _USAGE if isinstance(error, (SettingError, TargetError, OSError)) else _FOUND_WRONG


def _run_command(args: argparse.Namespace, screen: Screen) -> int:
    fields = {name: value for name in _SETTINGS if (value := getattr(args, name, None)) is not None}
    settings = Settings.from_env(**fields)
    module = importlib.import_module(args.run.module, "torch_cudal1.cli.commands")
    code = getattr(module, args.run.function)(args, settings, screen)
    if not isinstance(code, int):
        raise TypeError(f"command {args.command!r} answered {code!r}; expected an exit code")
    return code
