"""A file of results, one JSON object a line, written as soon as each is known: what long commands
go on from.

A line that cannot be read, such as one cut off by a kill, is no result; nothing that is there is
ever rewritten.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from torch_cudal1.core.report import plain

__all__ = ["append", "read"]


def read(out: Path, keys: Set[str]) -> Iterator[dict[str, Any]]:
    """Every readable line that has all of `keys`; none where there is no file."""
    if not out.exists():
        return
    # A kill may cut a line in the middle of a character, so decoding must not raise.
    for content in out.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(content)
        except ValueError:
            continue
        # A line of another command or of an older version has other keys: it is no result of this
        # one.
        if isinstance(entry, dict) and keys <= set(entry):
            yield entry


def append(out: Path | None, result: Mapping[str, Any]) -> None:
    """Add a line; after a line that was cut off, on a new one."""
    if out is None:
        return
    # Half a line that a kill left stays where it is; a new line behind it keeps the new result
    # whole.
    ends_with_newline = (
        not out.exists() or out.read_bytes().endswith(b"\n") or not out.stat().st_size
    )
    # Opened for each result: what was written is in the file, whatever happens to this process.
    with out.open("a", encoding="utf-8") as file:
        file.write(
            ("" if ends_with_newline else "\n") + json.dumps(plain(result), allow_nan=False) + "\n"
        )
