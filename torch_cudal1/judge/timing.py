"""The one clock: samples of callables in this process, one alone, two in pairs, or several in turn.

It runs in any process: the judge's child, the user's process for the end-to-end gate, and the benchmarks. A sample is the mean
time of one call, in microseconds of wall time, host work included, every stream of the device joined at its end. *Cold* (CUDA
only): each call by itself, after a flush of the L2 cache that is not timed. *Hot*: calls back to back, joined once, so that host
and device overlap as they do in use. It compares nothing and decides nothing: `judge.statistics` and `judge.decide` do.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import torch

from torch_cudal1.judge.profiles import TimingPlan

__all__ = [
    "L2",
    "Batch",
    "Side",
    "Warm",
    "batch_for",
    "batch_us",
    "device_time_us",
    "host_time_us",
    "interleave",
    "look",
    "sample_bucket",
    "synchronise",
    "temperatures",
    "warm",
]

Call: TypeAlias = Callable[[], object]
L2: TypeAlias = Literal["cold", "hot"]
Sink: TypeAlias = deque[object]
_ROUNDS, _FEWEST_ROUNDS = 30, 3
_SAMPLE_US = 2_500.0  # never under 200 us, where the clock and the scheduler show
_MOST_CALLS = 5_000
_FLUSHED_SHARE = 2.0  # a cold sample may take this many times its length, flushes included; then it has fewer calls
_SAME_COST = 1.25  # sides whose costs are this near get the same number of calls
_WARM_CALLS = 3
_SLOW_US = 300_000.0  # a call this long is warm after its first run, and its noise is small beside it
_WARM_S = 0.2
_FLUSH_BYTES = 256 << 20
_EVENTS = 10
_SYNC_SLACK_US = 5.0  # jitter of a host round trip


@dataclass(frozen=True)
class Warm:
    """What warming one side told: its first call here, the cost of a settled call, and the same with the flush before it."""

    first_us: float
    call_us: float
    flushed_us: float


@dataclass(frozen=True)
class Batch:
    """What to sample next: pairs, and calls per sample of either side."""

    l2: L2
    pairs: int
    calls: tuple[int, int]
    order: Literal["abba", "random"] = "abba"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Batch:
        """From the fields as a dictionary."""
        return cls(data["l2"], int(data["pairs"]), (int(data["calls"][0]), int(data["calls"][1])), data["order"])


@dataclass(frozen=True)
class Side:
    """Times of one side apart, medians in microseconds; None on the CPU, which has no device clock.

    `host_us`: until the call returns. `device_us`: between events around it, cold. `sync_ratio`: device time with every stream
    joined before the last event over the time without; well above 1 means work on a stream that the events do not see.
    """

    host_us: float
    device_us: float | None = None
    sync_ratio: float | None = None


def synchronise(device: torch.device) -> None:
    """Wait for everything on the device, every stream; nothing to do on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def temperatures(device: torch.device, plan: TimingPlan) -> tuple[L2, ...]:
    """Which states of the L2 cache are measured."""
    return ("hot",) if device.type != "cuda" or plan.hot_only else ("cold", "hot")


def warm(run: Call, device: torch.device) -> Warm:
    """Call until caches, clocks and lazy set-up have settled; costs are of the fastest of the last calls."""
    started = time.perf_counter()
    costs: list[float] = []
    totals: list[float] = []
    while len(costs) < _WARM_CALLS or (time.perf_counter() - started < _WARM_S and len(costs) < 1_000):
        begin = time.perf_counter()
        costs.append(_sample(run, 1, device))
        totals.append((time.perf_counter() - begin) * 1e6)
        if costs[-1] > _SLOW_US:
            break
    late = min(_WARM_CALLS, len(costs)) - 1
    return Warm(costs[0], min(costs[late:]), min(totals[late:]))


def batch_for(plan: TimingPlan, l2: L2, sides: tuple[Warm, Warm]) -> Batch:
    """Calls per sample so that each side is timed for `plan.sample_us`; pairs as planned."""
    a, b = (_calls(side, plan.sample_us, l2) for side in sides)
    near = max(side.call_us for side in sides) <= _SAME_COST * min(side.call_us for side in sides)
    calls = (max(a, b), max(a, b)) if near else (a, b)
    return Batch(l2, plan.pairs, (1, 1) if plan.gate == "paper" else calls, plan.order)


def sample_bucket(
    run_a: Call, run_b: Call, device: torch.device, batch: Batch, kept: Sink | None = None
) -> list[tuple[float, float]]:
    """Paired samples: (a, b) microseconds per call, one tuple a pair, in blocks of A B B A or B A A B at random.

    `kept` receives what the calls of b return (a deque with a length keeps the last ones); otherwise results die at once.
    """
    nowhere: Sink = deque(maxlen=0)
    sides = ((run_a, batch.calls[0], nowhere), (run_b, batch.calls[1], nowhere if kept is None else kept))
    samples: list[tuple[float, float]] = []
    while len(samples) < batch.pairs:
        first = random.random() < 0.5
        orders = (first, not first) if batch.order == "abba" else (first,)
        for a_leads in orders[: batch.pairs - len(samples)]:
            ordered = sides if a_leads else sides[::-1]
            one, other = (_sample(run, calls, device, batch.l2, sink) for run, calls, sink in ordered)
            samples.append((one, other) if a_leads else (other, one))
    return samples


def batch_us(run: Call, calls: int, device: torch.device, sink: Sink) -> float:
    """Microseconds of `calls` calls back to back, joined once; what they return goes to `sink`."""
    synchronise(device)
    start = time.perf_counter_ns()
    for _ in range(calls):
        sink.append(run())
    synchronise(device)
    return (time.perf_counter_ns() - start) / 1e3


def interleave(runs: Mapping[str, Call], device: torch.device, *, budget_s: float = 10.0) -> dict[str, list[float]]:
    """Time several callables in turn, each round in another random order: microseconds per call, 3 to 30 cold samples each."""
    costs = {name: warm(run, device) for name, run in runs.items()}
    calls = {name: _calls(cost, _SAMPLE_US, "cold") for name, cost in costs.items()}
    round_s = sum(costs[name].flushed_us * calls[name] for name in runs) / 1e6
    rounds = min(_ROUNDS, max(_FEWEST_ROUNDS, int(budget_s / max(round_s, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + budget_s
    for done in range(rounds):
        if done >= _FEWEST_ROUNDS and time.perf_counter() > end:
            break
        for name in random.sample(list(runs), len(runs)):
            samples[name].append(_sample(runs[name], calls[name], device))
    return samples


def look(run: Call, device: torch.device) -> Side:
    """Host and device time of a call apart, and whether it leaves work on streams that its own events do not wait for."""
    host_us = host_time_us(run, device)
    if device.type != "cuda":
        return Side(host_us)
    own, joined = _event_times(run, device)
    _, overhead = _event_times(lambda: None, device)
    hidden = max(0.0, joined - overhead - own - _SYNC_SLACK_US)
    return Side(host_us, device_time_us(run, device), 1 + hidden / max(own, 1e-3))


def host_time_us(run: Call, device: torch.device, *, calls: int = _EVENTS) -> float:
    """Median microseconds until a call returns, on an idle device; its device work is not waited for."""
    samples: list[float] = []
    while len(samples) < calls and (len(samples) < _FEWEST_ROUNDS or sum(samples) < _SLOW_US):
        synchronise(device)
        start = time.perf_counter_ns()
        kept = run()
        samples.append((time.perf_counter_ns() - start) / 1e3)
        del kept
    return statistics.median(samples)


def device_time_us(run: Call, device: torch.device, *, calls: int = _EVENTS) -> float:
    """Median microseconds between two events around a call with a cold L2 cache; 0.0 on the CPU, which has no device clock."""
    if device.type != "cuda":
        return 0.0
    return statistics.median(_between_events(run, device, cold=True, join=False) for _ in range(calls))


def _event_times(run: Call, device: torch.device) -> tuple[float, float]:
    """Medians without and with a device-wide join before the last event, taken in random order (after CUDA-L2's defence)."""
    samples: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_EVENTS):
        for join in random.sample((False, True), 2):
            samples[join].append(_between_events(run, device, cold=False, join=join))
    return statistics.median(samples[False]), statistics.median(samples[True])


def _between_events(run: Call, device: torch.device, *, cold: bool, join: bool) -> float:
    if cold:
        _flush(device)
    else:
        torch.cuda.synchronize(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    kept = run()
    if join:
        torch.cuda.synchronize(device)
    end.record()
    torch.cuda.synchronize(device)
    del kept
    return float(start.elapsed_time(end)) * 1e3


def _calls(side: Warm, sample_us: float, l2: L2) -> int:
    calls = sample_us / max(side.call_us, 0.1)
    if l2 == "cold":
        calls = min(calls, _FLUSHED_SHARE * sample_us / max(side.flushed_us, 0.1))
    return max(1, min(_MOST_CALLS, math.ceil(calls)))


def _sample(run: Call, calls: int, device: torch.device, l2: L2 = "cold", kept: Sink | None = None) -> float:
    """Mean microseconds of one call out of `calls`; results die as they would in a loop that throws them away, unless kept."""
    sink: Sink = deque(maxlen=0) if kept is None else kept
    if l2 == "cold" and device.type == "cuda":
        return _sample_cold(run, calls, device, sink)
    return batch_us(run, calls, device, sink) / calls


def _sample_cold(run: Call, calls: int, device: torch.device, sink: Sink) -> float:
    total = 0
    for _ in range(calls):
        _flush(device)
        torch.cuda.synchronize(device)
        start = time.perf_counter_ns()
        result = run()
        torch.cuda.synchronize(device)
        total += time.perf_counter_ns() - start
        sink.append(result)
        del result
    return total / calls / 1e3


def _flush(device: torch.device) -> None:
    _flush_buffer(device).zero_()


@cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    size = max(_FLUSH_BYTES, 2 * torch.cuda.get_device_properties(device).L2_cache_size)
    return torch.empty(size, dtype=torch.uint8, device=device)
