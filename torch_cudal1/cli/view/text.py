"""Numbers as people read them: speed-ups with intervals, durations, sizes, errors; and tables as
aligned plain text.

Pure functions from values to strings. Nothing is printed here and no terminal is asked anything.
"""

from __future__ import annotations

import math
import os
import textwrap
import unicodedata
from collections.abc import Sequence

from torch_cudal1.core.report import Interval, per_call

__all__ = [
    "ABSENT",
    "brief",
    "clean",
    "count_text",
    "decision",
    "duration",
    "error",
    "latency",
    "of_error",
    "ratio",
    "size",
    "speedup",
    "table",
]

# What a table shows for a number that was not measured. A 0 or 1.00x would read as a result.
ABSENT = "-"


def of_error(error: Exception) -> str:
    """An exception as a user reads it. What the system says of a path names no way on."""
    # Python's own message of a path ("[Errno 2] ...") does not say what to do.
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    expected = ""
    if isinstance(error, FileNotFoundError):
        expected = f"; expected a path that exists, and this one means {os.path.abspath(os.fsdecode(error.filename))}"
    elif isinstance(error, PermissionError):
        expected = "; expected a path that this user may read, and write where something is written"
    return f"{os.fsdecode(error.filename)!r}: {error.strerror}{expected}"


def speedup(value: Interval | float | None) -> str:
    """A speed-up such as "1.42x [1.38, 1.47]", or "1.42x" where no interval was measured (none, or
    one without width).
    """
    if value is None:
        return ABSENT
    # An interval without width was not measured: showing it would claim a precision.
    if isinstance(value, Interval) and value.low == value.high:
        return _times(value.value)
    if isinstance(value, Interval):
        return f"{_times(value.value)} [{_number(value.low)}, {_number(value.high)}]"
    return _times(value)


def count_text(number: int, singular: str, plural: str = "") -> str:
    """ "1 region", "2 regions", "0 entries"; `plural` where it is not just an s."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def decision(value: str) -> str:
    """What became of a candidate, from the value that entries and reports store."""
    return value.replace("not judged", "not validated")


def ratio(value: float | None) -> str:
    """An error ratio such as "0.97"; "<0.01" rather than a 0 that reads as exact."""
    if value is None:
        return ABSENT
    return "<0.01" if 0 < value < 0.01 else _number(value)


def error(value: float | None) -> str:
    """An error against float64, such as "1.2e-07"."""
    if value is None:
        return ABSENT
    return "0" if value == 0 else f"{value:.1e}"


def latency(value_us: float | None) -> str:
    """A time per call given in microseconds: "4.10 us", "12.3 ms", "1.20 s"."""
    return ABSENT if value_us is None else per_call(value_us)


def duration(seconds: float) -> str:
    """A waiting time: "0.4 s", "12 s", "3 min 20 s", "2 h 05 min"."""
    # Tenths below ten seconds: "0 s" would say nothing.
    if seconds < 10:
        return f"{seconds:.1f} s"
    # Rounded before the unit is chosen: 59.7 s is "1 min 00 s", never "60 s".
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"


def size(size_bytes: int) -> str:
    """A file size: "512 B", "1.5 MiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def clean(text: object) -> str:
    """`text` without control characters: a module's name must not move the cursor or colour the
    terminal.

    Line breaks and tabs become spaces, the rest becomes U+FFFD.
    """
    return "".join(
        # Category C holds control and format characters: escape sequences, and marks that reverse
        # the direction of text.
        " " if c in "\n\r\t" else "\ufffd" if unicodedata.category(c)[0] == "C" else c
        for c in str(text)
    )


def brief(text: object, limit: int = 300) -> str:
    """`text` on one line, cut at `limit` characters: the reason for a failure may hold a whole
    traceback.
    """
    line = " ".join(clean(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, width: int) -> str:
    """Columns aligned with spaces, at most `width` characters a line where words allow; the widest
    columns wrap.

    Columns whose every cell starts like a number are aligned to the right.
    """
    cells = [[clean(cell) for cell in row] for row in rows]
    columned = list(zip(columns, *cells, strict=True))
    # Columns are not made narrower than their longest word while there is another way: a name is
    # broken only where sentences cannot give way.
    words = [
        max(len(word) for cell in column for word in cell.split() or [""]) for column in columned
    ]
    widths = _fit([max(map(len, column)) for column in columned], words, width)
    right = [
        bool(cells) and all(row[i][:1].isdigit() or row[i] in (ABSENT, "") for row in cells)
        for i in range(len(columns))
    ]
    lines = _lines([clean(name) for name in columns], widths, right)
    lines.append("  ".join("-" * w for w in widths))
    for row in cells:
        lines += _lines(row, widths, right)
    return "\n".join(lines)


def _lines(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    wrapped = [textwrap.wrap(cell, w) or [""] for cell, w in zip(row, widths, strict=True)]
    out = []
    for i in range(max(map(len, wrapped), default=0)):
        parts = [part[i] if i < len(part) else "" for part in wrapped]
        padded = (
            p.rjust(w) if r else p.ljust(w) for p, w, r in zip(parts, widths, right, strict=True)
        )
        out.append("  ".join(padded).rstrip())
    return out


def _fit(widths: list[int], words: list[int], width: int) -> list[int]:
    """Narrow the widest column, a character at a time, until the line fits: first down to its
    longest word, then down to 12.
    """
    widths = list(widths)
    # Seven characters hold a number with its unit, so a column of numbers may become that narrow.
    for floors, least in ((words, 7), ([0] * len(words), 12)):
        while sum(widths) + 2 * (len(widths) - 1) > width:
            spare = [
                w if w > max(floor, least) else 0 for w, floor in zip(widths, floors, strict=True)
            ]
            # Words longer than the terminal: the line wraps, and nothing is cut.
            if not any(spare):
                break
            widths[spare.index(max(spare))] -= 1
    return widths


def _times(value: float) -> str:
    return f"{_number(value)}x"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
