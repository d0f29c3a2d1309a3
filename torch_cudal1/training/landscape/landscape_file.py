"""A landscape as one small file: gzip of JSON, rows of a task as columns, every word once. What is
read is what was written.

It is data: reading it runs nothing. A file that is cut short or of another form is refused as a
whole.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.training.landscape.rows import LandscapeRow

__all__ = ["Landscape", "LandscapeError", "read_landscape", "write_landscape"]

_FORMAT = 1
# Values of one column resemble each other, so columns compress better than rows.
_COLUMNS = ("program", "outcome", "score", "buckets", "detail", "source", "naive")
_WORDY = ("program", "outcome", "detail")


class LandscapeError(Cudal1Error, ValueError):
    """A landscape file that cannot be used, and why."""


@dataclass(frozen=True)
class Landscape:
    """Rows by task, where every program of a task was measured. `facts`: the machine, the versions
    and the plan that they were measured with.
    """

    facts: Mapping[str, Any]
    rows: Mapping[str, tuple[LandscapeRow, ...]]


def write_landscape(path: Path, landscape: Landscape) -> None:
    """Replace a file in one step. The same landscape gives the same bytes."""
    # Programs of a kind recur in every task of it, and reasons of failures in most: each text is
    # stored once.
    words: dict[str, int] = {}
    tasks = {task: _pack_columns(rows, words) for task, rows in landscape.rows.items()}
    data = {"format": _FORMAT, "facts": dict(landscape.facts), "words": list(words), "tasks": tasks}
    # NaN is no JSON: other readers would refuse the file.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    # Written beside it and renamed: a kill in the middle leaves the earlier landscape as it was.
    part_path = path.with_name(path.name + ".part")
    # gzip has the time of its making in its header; without it the same landscape gives the same
    # bytes, and its digest can be compared.
    part_path.write_bytes(gzip.compress(text, mtime=0))
    part_path.replace(path)


def read_landscape(path: Path) -> Landscape:
    """Read a landscape from a file. Raises LandscapeError for a file that is not one."""
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        if data["format"] != _FORMAT:
            raise LandscapeError(
                f"{path}: format {data['format']!r}, expected {_FORMAT}; a newer version of this package wrote it"
            )
        words: list[str] = data["words"]
        rows = {
            task: tuple(_unpack_rows(task, columns, words))
            for task, columns in data["tasks"].items()
        }
        return Landscape(data["facts"], rows)
    # A file that is cut short ends gzip with EOFError; one of another form fails in any of the
    # others. It is refused as a whole: half a landscape would raise for programs that were
    # measured.
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        # It is a ValueError itself, with a message that must stay.
        if isinstance(error, LandscapeError):
            raise
        raise LandscapeError(f"{path} is no landscape: {type(error).__name__}: {error}") from error


def _pack_columns(rows: Sequence[LandscapeRow], words: dict[str, int]) -> dict[str, list[Any]]:
    def x(name: str) -> Callable[[LandscapeRow], Any]:
        if name not in _WORDY:
            return lambda row: getattr(row, name)
        return lambda row: words.setdefault(getattr(row, name), len(words))

    return {name: [x(name)(row) for row in rows] for name in _COLUMNS}


def _unpack_rows(
    task: str, columns: Mapping[str, Sequence[Any]], words: Sequence[str]
) -> Iterable[LandscapeRow]:
    for values in zip(*(columns[name] for name in _COLUMNS), strict=True):
        row = {
            name: words[value] if name in _WORDY else value
            for name, value in zip(_COLUMNS, values, strict=True)
        }
        yield LandscapeRow.from_json({"task": task, **row})
