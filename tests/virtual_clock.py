"""A clock that tests advance by hand: speed-ups come out the same on a busy machine and an idle one.

What a callable takes is what it advances the clock by while it runs; the machine's own time is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from torch_cudal1.judge.benchmark import timing
from torch_cudal1.judge.benchmark.clock import Reading

__all__ = ["VirtualClock", "install_virtual_clock"]


@dataclass
class VirtualClock:
    """Stands in for `judge.benchmark.clock.Clock`. `now_us`: microseconds since it was made."""

    now_us: float = 0.0

    def advance(self, microseconds: float) -> None:
        """Let time pass, from inside of what is timed."""
        self.now_us += microseconds

    def read(
        self,
        calls: Sequence[Callable[[], object]],
        schedule: Sequence[int],
        *,
        cold: bool = False,
        repeats: Sequence[int] = (),
    ) -> list[Reading]:
        """One reading for each number of the schedule, as a real clock's."""
        counts = tuple(repeats) or (1,) * len(calls)
        readings = []
        for index in schedule:
            begin_us = self.now_us
            for _ in range(counts[index]):
                calls[index]()
            elapsed_us = self.now_us - begin_us
            readings.append(Reading(index, elapsed_us, elapsed_us))
        return readings


def install_virtual_clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """Have everything that samples callables in this process read a virtual clock."""
    clock = VirtualClock()

    def find_clock(_: torch.device) -> VirtualClock:
        return clock

    monkeypatch.setattr(timing, "choose_clock", find_clock)
    return clock
