"""The one implementation of timing: paired samples, interleaved samples, and the interval of a speed-up.

It runs in any process: the judge's child, the user's process for the end-to-end gate, and the benchmarks. A sample is the mean
time of one call, in microseconds of wall time, host work included; on CUDA each call is followed by a device-wide synchronisation
and preceded by a flush of the L2 cache (not timed). It compares nothing and decides nothing.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch

__all__ = ["BUCKETS", "PairedSummary", "device_time_us", "interleave", "sample_pairs", "summarise", "synchronise"]

Call: TypeAlias = Callable[[], object]
BUCKETS = 7  # CUDA-L1 paper: seven consecutive blocks of runs
_PAIRS = 56  # 8 a bucket, in profile fast
_FEWEST_PAIRS = 7  # one a bucket: the range of the seven is then a distribution-free 98.4 % interval of the median
_ROUNDS, _FEWEST_ROUNDS = 30, 3
_SAMPLE_US = 2_500.0  # with 8 pairs this is 20 ms a side and bucket; never under 200 us, where the clock and the scheduler show
_MOST_REPEATS = {"cpu": 5_000, "cuda": 48}  # on CUDA every call pays for a flush, which is not timed but takes time
_WARM_CALLS = 3
_SLOW_US = 300_000.0  # a call this long is warm after its first run, and its noise is small beside it
_WARM_S = 0.2
_FLUSH_BYTES = 256 << 20
_DRAWS = 2_000
_STEADY_SPREAD = 0.02  # MAD over median of the bucket values
_STEADY_VARIANCE = 0.005  # of the log bucket values


@dataclass(frozen=True)
class PairedSummary:
    """Speed-up of b over a (time of a / time of b): centre and 95 % interval, and the median times of both.

    `steady`: the seven buckets agree (MAD/median <= 2 %, variance of logs <= 0.005). When they do not, the interval is the range of
    the buckets.
    """

    speedup: float
    low: float
    high: float
    a_us: float
    b_us: float
    pairs: int
    steady: bool


def synchronise(device: torch.device) -> None:
    """Wait for everything on the device, every stream; nothing to do on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sample_pairs(run_a: Call, run_b: Call, device: torch.device, *, budget_s: float = 10.0) -> list[tuple[float, float]]:
    """Time two callables in ABBA blocks whose first side is random: (a, b) microseconds per call, one tuple a pair.

    56 pairs, fewer (down to 7) where they take longer than `budget_s` or the machine turns out slower than it looked.
    """
    cost_a, cost_b = (_warm(run, device) for run in (run_a, run_b))
    repeats = _repeats(min(cost_a, cost_b), device)
    sample_s = (cost_a + cost_b) * repeats / 1e6
    pairs = min(_PAIRS, max(_FEWEST_PAIRS, int(budget_s / max(sample_s, 1e-9))))
    pairs += pairs % 2 if pairs > _FEWEST_PAIRS else 0
    samples: list[tuple[float, float]] = []
    end = time.perf_counter() + budget_s
    while len(samples) < (pairs if time.perf_counter() < end else _FEWEST_PAIRS):
        first_a = random.random() < 0.5
        for a_leads in (first_a, not first_a)[: pairs - len(samples)]:
            sides = (run_a, run_b) if a_leads else (run_b, run_a)
            left, right = (_sample(run, repeats, device) for run in sides)
            samples.append((left, right) if a_leads else (right, left))
    return samples


def interleave(runs: Mapping[str, Call], device: torch.device, *, budget_s: float = 10.0) -> dict[str, list[float]]:
    """Time several callables in turn, each round in another random order: microseconds per call, 3 to 30 samples each."""
    costs = {name: _warm(run, device) for name, run in runs.items()}
    repeats = {name: _repeats(cost, device) for name, cost in costs.items()}
    round_s = sum(costs[name] * repeats[name] for name in runs) / 1e6
    rounds = min(_ROUNDS, max(_FEWEST_ROUNDS, int(budget_s / max(round_s, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + budget_s
    for done in range(rounds):
        if done >= _FEWEST_ROUNDS and time.perf_counter() > end:
            break
        for name in random.sample(list(runs), len(runs)):
            samples[name].append(_sample(runs[name], repeats[name], device))
    return samples


def device_time_us(run: Call, device: torch.device, *, calls: int = 10) -> float:
    """Median microseconds between two events around a call with a cold L2 cache; 0.0 on the CPU, which has no device clock."""
    if device.type != "cuda":
        return 0.0
    samples: list[float] = []
    for _ in range(calls):
        _flush(device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        kept = run()
        end.record()
        torch.cuda.synchronize(device)
        del kept
        samples.append(start.elapsed_time(end) * 1e3)
    return statistics.median(samples)


def summarise(pairs: Sequence[tuple[float, float]]) -> PairedSummary:
    """The speed-up a/b and its 95 % interval: hierarchical bootstrap over seven consecutive buckets and the pairs in them.

    Raises ValueError for fewer than 7 pairs or a time that is not positive.
    """
    if len(pairs) < _FEWEST_PAIRS or any(not (0 < value < math.inf) for pair in pairs for value in pair):
        raise ValueError(f"expected at least {_FEWEST_PAIRS} pairs of positive times, came {len(pairs)}")
    size = len(pairs) // BUCKETS
    ratios = torch.tensor([a / b for a, b in pairs[: size * BUCKETS]], dtype=torch.float64).reshape(BUCKETS, size)
    values = _middle(ratios)
    centre = float(values.median())
    low, high = _bootstrap(ratios)
    steady = _steady(values)
    least, most = float(values.min()), float(values.max())
    if not steady or most - least > 2 * (high - low):  # the range of 7 buckets holds the median with 98.4 %, whatever they follow
        low, high = least, most
    a_us, b_us = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    return PairedSummary(centre, min(low, centre), max(high, centre), a_us, b_us, len(pairs), steady)


def _middle(ratios: torch.Tensor) -> torch.Tensor:
    """The median over the last dimension, the mean of both middle values for an even count."""
    return ratios.quantile(0.5, dim=-1)


def _bootstrap(ratios: torch.Tensor) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)  # the same samples always tell the same interval
    size = ratios.shape[1]
    buckets = torch.randint(BUCKETS, (_DRAWS, BUCKETS, 1), generator=generator)
    picked = torch.randint(size, (_DRAWS, BUCKETS, size), generator=generator)
    drawn = _middle(_middle(ratios[buckets, picked]))
    return float(drawn.quantile(0.025)), float(drawn.quantile(0.975))


def _steady(values: torch.Tensor) -> bool:
    median = values.median()
    spread = float((values - median).abs().median() / median)
    return spread <= _STEADY_SPREAD and float(values.log().var()) <= _STEADY_VARIANCE


def _repeats(cost_us: float, device: torch.device) -> int:
    return max(1, min(_MOST_REPEATS[device.type], math.ceil(_SAMPLE_US / max(cost_us, 0.1))))


def _warm(run: Call, device: torch.device) -> float:
    """Call until caches, clocks and lazy set-up have settled; microseconds of the fastest of the last calls."""
    started = time.perf_counter()
    costs: list[float] = []
    while len(costs) < _WARM_CALLS or (time.perf_counter() - started < _WARM_S and len(costs) < 1_000):
        costs.append(_sample(run, 1, device))
        if costs[-1] > _SLOW_US:
            break
    return min(costs[_WARM_CALLS - 1 :] or costs)


def _sample(run: Call, repeats: int, device: torch.device) -> float:
    """Mean microseconds of one call out of `repeats`; results die as they would in a loop that throws them away."""
    if device.type != "cuda":
        start = time.perf_counter_ns()
        for _ in range(repeats):
            run()
        return (time.perf_counter_ns() - start) / repeats / 1e3
    total = 0
    for _ in range(repeats):
        _flush(device)
        torch.cuda.synchronize(device)
        start = time.perf_counter_ns()
        kept = run()
        torch.cuda.synchronize(device)
        total += time.perf_counter_ns() - start
        del kept
    return total / repeats / 1e3


def _flush(device: torch.device) -> None:
    _flush_buffer(device).zero_()


@cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    size = max(_FLUSH_BYTES, 2 * torch.cuda.get_device_properties(device).L2_cache_size)
    return torch.empty(size, dtype=torch.uint8, device=device)
