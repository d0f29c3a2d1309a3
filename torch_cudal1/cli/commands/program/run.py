"""`cudal1 run script.py ...` and `cudal1 run -m module ...`: an unmodified program, accelerated.

The program runs in this process, as `python script.py ...` would run it: its arguments, its exit code
and its exceptions are its own. What ran and what it was worth is reported on stderr when it ends.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType

from torch_cudal1.api.script.hooks import AcceleratedModule, ScriptHooks
from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.errors import TargetError
from torch_cudal1.core.report import per_call
from torch_cudal1.core.settings import Settings, export_settings

__all__ = ["run"]

# The options of `cudal1 run` that are settings.
_SETTINGS = ("precision", "assume_finite", "cache_dir", "offline", "hub", "on_miss")


def run(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Run the program and report. The exit code is the program's; 1 where it raised."""
    # The program's own calls of torch.compile, and processes that it starts, read them there.
    export_settings({name: getattr(args, name) for name in _SETTINGS})
    hooks = ScriptHooks(settings)
    with hooks.install():
        code = _run_program(args)
    _report(hooks, screen)
    return code


def _run_program(args: argparse.Namespace) -> int:
    path = Path(args.program)
    if not args.as_module and not path.is_file():
        raise TargetError(args.program, "expected a Python file, or -m and the name of a module")
    old_argv, old_path = sys.argv, list(sys.path)
    sys.argv = [args.program, *args.arguments]
    # What `python script.py` and `python -m module` put first.
    sys.path.insert(0, os.getcwd() if args.as_module else str(path.resolve().parent))
    try:
        if args.as_module:
            runpy.run_module(args.program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as exit_request:
        return _exit_code(exit_request)
    # The program's own error, whatever it is, with the program's own frames.
    except Exception as error:  # noqa: BLE001
        traceback.print_exception(error.with_traceback(_skip_runners(error.__traceback__)))
        return 1
    finally:
        sys.argv, sys.path[:] = old_argv, old_path
    return 0


def _exit_code(exit_request: SystemExit) -> int:
    """What Python makes of `sys.exit(code)`: None is 0, and a text is printed and means 1."""
    code = exit_request.code
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _skip_runners(frames: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the program."""
    runners = (__file__, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_frame.f_code.co_filename in runners:
        frames = frames.tb_next
    return frames


def _report(hooks: ScriptHooks, screen: Screen) -> None:
    lines = [_describe_module(module) for module in hooks.modules]
    if hooks.compilations:
        lines.append(f"torch.compile: {hooks.compilations} calls, with the backend cudal1")
    if not lines:
        lines = ["the program called no module with parameters"]
    for line in lines:
        screen.note(line)


def _describe_module(module: AcceleratedModule) -> str:
    explanation = module.explanation
    runs = ", ".join(dict.fromkeys(region.runs for region in explanation.regions))
    reasons = "; ".join([*explanation.left_out, *filter(None, [explanation.undone])])
    sentence = f"{module.name}, {module.calls} calls: {runs or 'its own forward'}"
    if reasons:
        sentence += f" ({reasons})"
    if module.saved_us:
        sentence += f"; about {per_call(module.saved_us)} saved a call"
        total_s = 1e-6 * module.saved_us * module.calls
        sentence += f", {text.duration(total_s)} in all" if total_s >= 1 else ""
    return sentence
