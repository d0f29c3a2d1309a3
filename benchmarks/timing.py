"""How the suite times: the package's one timing implementation, and nothing beside it
(`torch_cudal1.judge.benchmark.timing`).

A sample is wall time of whole calls, host work included, each call synchronised, the L2 cache
flushed before it. This file only collects samples of several contenders in interleaved rounds and
pairs them up; it knows nothing of models or of correctness.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from torch_cudal1.judge.benchmark.statistics import summarise
from torch_cudal1.judge.benchmark.timing import interleave

__all__ = ["Samples", "sample"]

Run: TypeAlias = Callable[[], object]

_NARROW = 0.02  # high minus low of a speed-up, relative to it
FEWEST = 14  # two pairs in each of the seven buckets; `summarise` refuses fewer


@dataclass(frozen=True)
class Samples:
    """Microseconds per call, one number a round for each run; the numbers of one round are a pair
    for any two runs.
    """

    us: Mapping[str, tuple[float, ...]]

    def median_us(self, name: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.us[name])

    def speedup(self, baseline: str, name: str) -> dict[str, float]:
        """Baseline time over contender time, "speedup" with its 95 % interval "low" to "high";
        "steady" is 1 or 0.
        """
        found = summarise(list(zip(self.us[baseline], self.us[name], strict=True)))
        return {
            "speedup": found.speedup,
            "low": found.low,
            "high": found.high,
            "steady": int(found.steady),
        }


def sample(runs: Mapping[str, Run], *, device: str, rounds: int, more_s: float = 0.0) -> Samples:
    """Time every run at least max(`rounds`, 14) times, in rounds of random order; at most about 10
    s for each 30 rounds.

    Then goes on, for at most `more_s` seconds, until the 95 % interval of each run against the
    first is narrower than 2 % of it: on a busy host, 40 training steps leave ten percent open.
    """
    us: dict[str, list[float]] = {name: [] for name in runs}

    def again() -> None:
        for name, values in interleave(runs, torch.device(device), budget_s=10.0).items():
            us[name] += values

    while runs and min(map(len, us.values())) < max(rounds, FEWEST):
        again()
    end = time.perf_counter() + more_s
    while runs and time.perf_counter() < end and _widest(us) > _NARROW:
        again()
    return Samples({name: tuple(values) for name, values in us.items()})


def _widest(us: Mapping[str, Sequence[float]]) -> float:
    """The widest interval of a run against the first one, relative to its speed-up."""
    first, *others = us
    found = [summarise(list(zip(us[first], us[name], strict=True))) for name in others]
    return max(((one.high - one.low) / one.speedup for one in found), default=0.0)
