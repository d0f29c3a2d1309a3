"""Measures the seconds of each step of one measurement, by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Stopwatch"]


@dataclass
class Stopwatch:
    """`seconds`: step -> seconds, summed over its runs."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time of the body to step `name`, also where the body raises."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def move(self, name: str, to: str, seconds: float) -> None:
        """Count `seconds` of step `name` as those of step `to`."""
        self.seconds[name] -= seconds
        self.seconds[to] = self.seconds.get(to, 0.0) + seconds
