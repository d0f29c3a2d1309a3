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

__all__ = ["Samples", "collect_samples"]

Run: TypeAlias = Callable[[], object]

_MAX_INTERVAL_WIDTH = 0.02  # high minus low of a speed-up, relative to it
MIN_ROUNDS = 14  # two pairs in each of the seven buckets; `summarise` refuses fewer


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
        summary = summarise(list(zip(self.us[baseline], self.us[name], strict=True)))
        return {
            "speedup": summary.speedup,
            "low": summary.low,
            "high": summary.high,
            "steady": int(summary.steady),
        }


def collect_samples(
    runs: Mapping[str, Run], *, device: str, rounds: int, more_s: float = 0.0
) -> Samples:
    """Time every run at least max(`rounds`, 14) times, in rounds of random order; at most about 10
    s for each 30 rounds.

    Then goes on, for at most `more_s` seconds, until the 95 % interval of each run against the
    first is narrower than 2 % of it: on a busy host, 40 training steps leave ten percent open.
    """
    us: dict[str, list[float]] = {name: [] for name in runs}

    def take_round() -> None:
        for name, values in interleave(runs, torch.device(device), budget_s=10.0).items():
            us[name] += values

    while runs and min(map(len, us.values())) < max(rounds, MIN_ROUNDS):
        take_round()
    end = time.perf_counter() + more_s
    while runs and time.perf_counter() < end and _widest_interval(us) > _MAX_INTERVAL_WIDTH:
        take_round()
    return Samples({name: tuple(values) for name, values in us.items()})


def _widest_interval(us: Mapping[str, Sequence[float]]) -> float:
    """The widest interval of a run against the first one, relative to its speed-up."""
    first, *other_names = us
    summaries = [summarise(list(zip(us[first], us[name], strict=True))) for name in other_names]
    return max(
        ((summary.high - summary.low) / summary.speedup for summary in summaries), default=0.0
    )
