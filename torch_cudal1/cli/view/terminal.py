"""What a command shows while and after it works: lines, tables, JSON and progress.

Tables and progress go through `rich` when it is installed and the stream is a terminal; otherwise
plain aligned text. Results go to stdout, progress and problems to stderr, so output can be piped.
It formats and prints; it decides nothing.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from torch_cudal1.cli.view import text
from torch_cudal1.core.report import plain

try:
    import rich.console
    import rich.progress
    import rich.table
    import rich.text
except ImportError:
    # `rich` comes with the optional extra "report".
    _RICH = False
else:
    _RICH = True

__all__ = ["Progress", "ProgressCallback", "Screen"]

ProgressCallback = Callable[[str, float | None], None]
# Work shorter than this shows no progress: a bar that flashes up says nothing.
_QUIET_S = 2.0
# How often a stream that is no terminal (a log file) gets a line.
_REPEAT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Screen:
    """Where a command writes. `as_json`: stdout holds one JSON value and nothing else. `quiet`: no
    progress, results only.
    """

    as_json: bool = False
    quiet: bool = False
    out: TextIO = field(default_factory=lambda: sys.stdout)
    err: TextIO = field(default_factory=lambda: sys.stderr)
    width: int = field(default_factory=lambda: max(40, shutil.get_terminal_size((110, 24)).columns))

    def line(self, content: str = "") -> None:
        """One line (or paragraph) for people; nothing under `as_json`."""
        if not self.as_json:
            # Names and reasons come from models and kernels of other people: a control character
            # must not move the cursor or colour the terminal.
            print("\n".join(text.clean(part) for part in content.split("\n")), file=self.out)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table for people; nothing under `as_json`."""
        if self.as_json:
            return
        # A pipe or a file gets plain text, which tools can read.
        if _RICH and self.out.isatty():
            _rich_table(columns, rows, self.out, self.width)
        else:
            print(text.table(columns, rows, width=self.width), file=self.out)

    def json(self, value: Any) -> None:
        """`value` as JSON, under `as_json` only."""
        if self.as_json:
            # `allow_nan=False`: NaN is not JSON, and `plain` has turned such numbers into text.
            print(json.dumps(plain(value), indent=2, allow_nan=False), file=self.out)

    def problem(self, message: str) -> None:
        """One paragraph on stderr."""
        print(f"cudal1: {text.clean(message)}", file=self.err)

    def note(self, message: str) -> None:
        """One line on stderr beside another program's output; nothing if `quiet`."""
        if not self.quiet:
            print(f"cudal1: {text.clean(message)}", file=self.err)

    @contextmanager
    def progress(self) -> Iterator[ProgressCallback]:
        """A callback `(what is being done, fraction done or None)` that shows itself only once the
        work has lasted two seconds.
        """
        with Progress(_display(self)).open_display() as callback:
            yield callback


class _Display(Protocol):
    def show(self, activity: str, fraction: float | None, remaining: str) -> None: ...
    def close(self) -> None: ...


class Progress:
    """Turns `(what, fraction)` reports into a display with time left. `clock` gives seconds."""

    def __init__(self, display: _Display, clock: Callable[[], float] = time.monotonic) -> None:
        self._display, self._clock, self._start = display, clock, clock()

    @contextmanager
    def open_display(self) -> Iterator[ProgressCallback]:
        """The callback, with the display closed at the end whatever happens."""
        try:
            yield self.update
        finally:
            self._display.close()

    def update(self, activity: str, fraction: float | None) -> None:
        """Report. `fraction` is from 0 to 1, or None when it is not known."""
        passed = self._clock() - self._start
        if passed >= _QUIET_S:
            # A caller's fraction may run over 1, and a bar must not run beyond its end.
            shown_fraction = None if fraction is None else min(max(fraction, 0.0), 1.0)
            self._display.show(
                text.clean(activity), shown_fraction, time_left(passed, shown_fraction)
            )


def time_left(passed_s: float, fraction: float | None) -> str:
    """ "about 12 s left", from the time that passed and the fraction done; the time passed when the
    fraction says too little.
    """
    # Below 2 % the quotient jumps from report to report.
    if fraction is None or fraction < 0.02:
        return f"{text.duration(passed_s)} so far"
    return f"about {text.duration(passed_s * (1 - fraction) / fraction)} left"


def _display(screen: Screen) -> _Display:
    if screen.quiet:
        return _Silent()
    # Progress goes to stderr, so this is the stream that decides; stdout may be a pipe.
    if screen.err.isatty():
        return _Bar(screen.err, screen.width) if _RICH else _OneLine(screen.err, screen.width)
    return _Log(screen.err)


class _Silent:
    def show(self, activity: str, fraction: float | None, remaining: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Log:
    """A line every ten seconds, for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        # So that the first report after two seconds is shown at once.
        self._stream, self._last = stream, -_REPEAT_S

    def show(self, activity: str, fraction: float | None, remaining: str) -> None:
        if time.monotonic() - self._last >= _REPEAT_S:
            self._last = time.monotonic()
            print(_sentence(activity, fraction, remaining), file=self._stream, flush=True)

    def close(self) -> None:
        pass


class _OneLine:
    """One line of a terminal, rewritten; wiped at the end."""

    def __init__(self, stream: TextIO, width: int) -> None:
        self._stream, self._width, self._used = stream, width, False

    def show(self, activity: str, fraction: float | None, remaining: str) -> None:
        self._used = True
        # A full line would wrap, and "\r" only returns to the start of the last row.
        content = _sentence(activity, fraction, remaining)[: self._width - 1]
        print(f"\r{content.ljust(self._width - 1)}", end="", file=self._stream, flush=True)

    def close(self) -> None:
        if self._used:
            print(f"\r{' ' * (self._width - 1)}\r", end="", file=self._stream, flush=True)


class _Bar:
    """A bar by `rich`, wiped at the end."""

    def __init__(self, stream: TextIO, width: int) -> None:
        columns = (
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TextColumn("{task.description}", markup=False),
        )
        console = rich.console.Console(file=stream, width=width)
        self._bar = rich.progress.Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("", total=None)
        self._started = False

    def show(self, activity: str, fraction: float | None, remaining: str) -> None:
        # Started late: work that is done within two seconds draws nothing.
        if not self._started:
            self._bar.start()
            self._started = True
        total = None if fraction is None else 1.0
        self._bar.update(
            self._task,
            description=_sentence(activity, fraction, remaining),
            total=total,
            completed=fraction or 0.0,
        )

    def close(self) -> None:
        if self._started:
            self._bar.stop()


def _sentence(activity: str, fraction: float | None, remaining: str) -> str:
    return f"{'' if fraction is None else f'{fraction:4.0%}  '}{activity} ({remaining})"


def _rich_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], out: TextIO, width: int
) -> None:
    table = rich.table.Table(box=None, header_style="bold", pad_edge=False)
    for i, name in enumerate(columns):
        # The text may be a number with a unit ("12 ms"), so the first character decides.
        numeric = bool(rows) and all(
            row[i][:1].isdigit() or row[i] in (text.ABSENT, "") for row in rows
        )
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        # `Text`, because brackets in a name would be read as markup.
        table.add_row(*(rich.text.Text(text.clean(cell)) for cell in row))
    rich.console.Console(file=out, width=width).print(table)
