"""Seconds that each step of one measurement took, by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Stopwatch"]


@dataclass
class Stopwatch:
    """`seconds` of each step; a step that runs again is added to."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Count the time of the body, also where it raises."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def move(self, name: str, to: str, seconds: float) -> None:
        """Count some of a step's time as another's."""
        self.seconds[name] -= seconds
        self.seconds[to] = self.seconds.get(to, 0.0) + seconds
