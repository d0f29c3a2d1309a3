"""A journal of rollouts: what was sampled for a step, on the disk before anything of it is
measured.

After a kill the step is read from this file, token by token, instead of being sampled again, so
the measurements in the database still belong to it, on every device. JSON lines; a line that was
cut off is ignored, and its step is sampled again. It holds no measurements (`database` does) and no
weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["SampleJournal"]


class SampleJournal:
    """One record a key. Only one process writes; the database's lock sees to that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, dict[str, Any]] = {}
        if path.exists():
            content = path.read_bytes()
            complete = content[: content.rfind(b"\n") + 1]
            # Half a line is what a killed writer left; the next append must not continue it.
            if len(complete) < len(content):
                os.truncate(path, len(complete))
            for line in complete.splitlines():
                self._took(line)

    def get(self, key: str) -> Mapping[str, Any] | None:
        """The record of that key; None where there is none yet."""
        return self._known.get(key)

    def keys(self) -> list[str]:
        """In the order in which they came."""
        return list(self._known)

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Put a record on the disk. Raises ValueError for a key that has one: what was sampled is
        never replaced.
        """
        # Measurements on record belong to the first text; another one under its key would inherit
        # them.
        if key in self._known:
            raise ValueError(f"the journal {self.path} already has {key!r}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(json.dumps({"key": key, **record}, allow_nan=False).encode() + b"\n")
            file.flush()
            # On the disk before the sample is measured: completions cost money, and measurements
            # refer to them.
            os.fsync(file.fileno())
        self._known[key] = dict(record)

    def _took(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            # The first one counts, as in `add`.
            self._known.setdefault(record.pop("key"), record)
        except (ValueError, KeyError, AttributeError, TypeError):
            # A line that is damaged in the middle counts as absent: its step is sampled again.
            return
