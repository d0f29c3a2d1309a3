"""The CUDA-L1 release format: one JSON object a line with level_id, task_id, ref_code, custom_code,
and scores.

Scores are kept and not believed. A null code, or the string "None", was withdrawn by its authors:
such a line is counted, never dropped. A line that is no task is a value with its reason. It runs
nothing and judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BadLine", "Line", "read_lines"]

_EXPECTED = "expected a JSON object with level_id, task_id, ref_code and custom_code"


@dataclass(frozen=True)
class Line:
    """One line of a release file. `candidate` None: withdrawn. `scores`: what the file claims."""

    number: int
    level: int | None
    task: str
    reference: str
    candidate: str | None
    scores: Mapping[str, Any]

    @property
    def name(self) -> str:
        """For people."""
        return f"level {self.level} task {self.task}"


@dataclass(frozen=True)
class BadLine:
    """A line that is no task: its start, and what is wrong with it."""

    number: int
    content: str
    reason: str


def read_lines(path: Path) -> Iterator[Line | BadLine]:
    """The lines of a file, in order; empty ones are passed over. Raises OSError."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, content in enumerate(file, start=1):
            if content.strip():
                yield _line(number, content)


def _line(number: int, content: str) -> Line | BadLine:
    start = " ".join(content.split())[:80]
    try:
        found = json.loads(content)
        code = found["custom_code"]
        reference, level, task = found["ref_code"], found.get("level_id"), found["task_id"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return BadLine(number, start, f"{_EXPECTED} ({type(error).__name__}: {error})")
    if not isinstance(reference, str) or not (code is None or isinstance(code, str)):
        return BadLine(number, start, f"{_EXPECTED}; the codes as strings")
    scores = {name: value for name, value in found.items() if name.startswith("score")}
    gone = code is None or code.strip() in ("", "None")
    return Line(
        number,
        int(level) if str(level).isdecimal() else None,
        str(task),
        reference,
        None if gone else code,
        scores,
    )
