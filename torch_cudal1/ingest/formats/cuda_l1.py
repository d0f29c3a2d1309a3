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

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.formats.task import PublishedTask, UnreadableTask

__all__ = ["CudaL1Release", "ReleaseLine", "UnreadableLine", "read_lines"]

_EXPECTED = "expected a JSON object with level_id, task_id, ref_code and custom_code"


@dataclass(frozen=True)
class ReleaseLine:
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
class UnreadableLine(Refusal):
    """A line that is no task: what is wrong with it, and its start."""

    number: int
    content: str


@dataclass(frozen=True)
class CudaL1Release:
    """A release file of CUDA-L1."""

    name: str = "CUDA-L1 release"
    layout: str = "a file of JSON lines with `ref_code` and `custom_code`"

    def recognises(self, path: Path) -> bool:
        """Any file but Python: releases have no ending of their own."""
        # Last in the registry, so what no other format takes comes here.
        return not path.is_dir() and path.suffix != ".py"

    def read_tasks(
        self, path: Path, references: Path | None
    ) -> Iterator[PublishedTask | UnreadableTask]:
        """One task a line; each line has its own reference."""
        for line in read_lines(path):
            where = f"{path}:{line.number}"
            if isinstance(line, UnreadableLine):
                yield UnreadableTask(line.reason, where)
                continue
            labels = {"level_id": line.level, "task_id": line.task}
            yield PublishedTask(
                where, line.name, line.reference, line.candidate, line.scores, labels
            )


def read_lines(path: Path) -> Iterator[ReleaseLine | UnreadableLine]:
    """The lines of a file, in order; empty ones are passed over. Raises OSError."""
    # Bad bytes damage one line, which then fails as a source, and not the reading of the others.
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, content in enumerate(file, start=1):
            if content.strip():
                yield _parse_line(number, content)


def _parse_line(number: int, content: str) -> ReleaseLine | UnreadableLine:
    # A line holds whole sources; its start is enough to find it.
    excerpt = " ".join(content.split())[:80]
    try:
        row = json.loads(content)
        code = row["custom_code"]
        reference, level, task = row["ref_code"], row.get("level_id"), row["task_id"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return UnreadableLine(f"{_EXPECTED} ({type(error).__name__}: {error})", number, excerpt)
    # `null` is a withdrawn kernel and no error; a number or a list is.
    if not isinstance(reference, str) or not (code is None or isinstance(code, str)):
        return UnreadableLine(f"{_EXPECTED}; the codes as strings", number, excerpt)
    # Claims of the publisher, kept for comparison and never believed.
    scores = {name: value for name, value in row.items() if name.startswith("score")}
    # Releases also hold the text "None", which is how Python prints a missing value.
    is_withdrawn = code is None or code.strip() in ("", "None")
    return ReleaseLine(
        number,
        # Only a label: a line without a level is a task all the same.
        int(level) if str(level).isdecimal() else None,
        str(task),
        reference,
        None if is_withdrawn else code,
        scores,
    )
