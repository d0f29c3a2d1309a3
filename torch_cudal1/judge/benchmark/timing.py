"""Samples of callables in this process by `judge.benchmark.clock`, one alone, two in pairs, or
several in turn.

It runs in any process: the judge's child, the user's process for the end-to-end gate, and the
benchmarks. A sample is the mean time of one call, in microseconds of wall time, host work included,
every stream of the device joined at its end. *Cold* (CUDA only): each call by itself, after a flush
of the L2 cache that is not timed. *Hot*: calls back to back, joined once, so that host and device
overlap as they do in use. It compares nothing and decides nothing: `judge.benchmark.statistics` and
`judge.evaluate.decide` do.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from torch_cudal1.judge.benchmark.clock import Call, choose_clock, synchronise
from torch_cudal1.judge.benchmark.timing_plan import TimingPlan

__all__ = [
    "L2",
    "QueuedTime",
    "SampleBatch",
    "SideTimes",
    "WarmCosts",
    "batch_for",
    "batch_us",
    "draw_leading_sides",
    "host_time_us",
    "interleave",
    "list_l2_states",
    "measure_device_time_us",
    "measure_side",
    "sample_bucket",
    "sync_ratio",
    "time_queued_calls",
    "warm_up",
]
_CHANCE = random.SystemRandom()  # a process that measures keeps the user's generators as they are

L2: TypeAlias = Literal["cold", "hot"]
Sink: TypeAlias = deque[object]
_ROUNDS, _FEWEST_ROUNDS, _ENOUGH_TO_RANK = 30, 3, 5
_SAMPLE_US = 2_500.0  # never under 200 us, where the clock and the scheduler show
_MOST_CALLS = 5_000
# a cold sample may take this many times its length, flushes included; then it has fewer calls
_FLUSHED_SHARE = 2.0
_LONGEST = 4  # samples: the slower side of two may be timed for this many
# beside a call of a second one of 10 ms would be its noise
_LONG_US, _PART_OF_LONG = (10_000.0, 0.05)
_WARM_CALLS = 3
_FAR = 1.25
# a call this long is warm after its first run, and its noise is small beside it
_SLOW_US = 300_000.0
_WARM_S, _RAN_SHARE = 0.2, 0.5
_EVENTS, _LOOKS = 10, 3
# A launch from Python takes 20 to 80 us of a host; where the GPU did not wait for it, calls are
# made again behind a longer wait.
_QUEUED_US, _LEAD, _QUEUE_TRIES, _CYCLES_PER_US = 80.0, 1.2, 5, 2_000
# jitter of a host round trip; a ratio below this needs no second look
_SYNC_SLACK_US, _SYNC_SURE = (5.0, 1.2)


@dataclass(frozen=True)
class WarmCosts:
    """What warming one side told: its first call here, the cost of a settled call, and the same
    with the flush before it.
    """

    first_us: float
    call_us: float
    flushed_us: float


@dataclass(frozen=True)
class SampleBatch:
    """What to sample next: pairs, and calls per sample of either side."""

    l2: L2
    pairs: int
    calls: tuple[int, int]
    order: Literal["abba", "random"] = "abba"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SampleBatch:
        """From the fields as a dictionary."""
        return cls(
            data["l2"],
            int(data["pairs"]),
            (int(data["calls"][0]), int(data["calls"][1])),
            data["order"],
        )


@dataclass(frozen=True)
class SideTimes:
    """Times of one side apart, medians in microseconds; None on the CPU, which has no device clock.

    `host_us`: until the call returns. `device_us`: between events around it, cold. `sync_ratio`:
    time until every stream is joined over the time between the events; well above 1 means work on a
    stream that the events do not see.
    """

    host_us: float
    device_us: float | None = None
    sync_ratio: float | None = None


@dataclass(frozen=True)
class QueuedTime:
    """Microseconds of a batch on the GPU, and those that the host took to queue each of its calls."""

    spent_us: float
    host_us: float


def list_l2_states(device: torch.device, plan: TimingPlan) -> tuple[L2, ...]:
    """Which states of the L2 cache are measured."""
    return ("hot",) if device.type != "cuda" or plan.hot_only else ("cold", "hot")


def warm_up(run: Call, device: torch.device, *, settle_s: float = _WARM_S) -> WarmCosts:
    """Call until caches, clocks and lazy set-up have settled; costs are of the fastest of the last
    calls.
    """
    started = time.perf_counter()
    costs: list[float] = []
    totals: list[float] = []
    # Clocks of a GPU settle in time, not in calls; a count bounds calls of microseconds.
    while len(costs) < _WARM_CALLS or (
        time.perf_counter() - started < settle_s and len(costs) < 1_000
    ):
        begin = time.perf_counter()
        costs.append(_sample(run, 1, device))
        totals.append((time.perf_counter() - begin) * 1e6)
        if costs[-1] > _SLOW_US:
            break
    # The last few only: the first ones hold compilation and set-up.
    late = min(_WARM_CALLS, len(costs)) - 1
    return WarmCosts(costs[0], min(costs[late:]), min(totals[late:]))


def batch_for(plan: TimingPlan, l2: L2, sides: tuple[WarmCosts, WarmCosts]) -> SampleBatch:
    """Calls per sample, as many on either side, so that the faster one is timed for
    `plan.sample_us`; pairs as planned.

    The slower side is timed for four samples at most. Beside a call of 10 ms and more the faster
    side is timed for a twentieth of what that call takes.
    """
    slow_us = max(side.call_us for side in sides)
    # One number of calls for both sides: the join at a sample's end then draws every ratio towards
    # 1. With a number for each, one kernel beside another process on its GPU was 15 times as fast
    # as itself.
    desired_calls = max(_choose_calls(side, plan.sample_us, l2) for side in sides)
    shared = min(desired_calls, max(1, int(_LONGEST * plan.sample_us / max(slow_us, 0.1))))
    # Beside a call of 10 ms and more the join is nothing, and the faster side's noise needs more
    # calls.
    part_us = _PART_OF_LONG * shared * slow_us if slow_us >= _LONG_US else 0.0
    a, b = (
        max(shared, min(_MOST_CALLS, math.ceil(part_us / max(side.call_us, 0.1)))) for side in sides
    )
    # The paper's samples are single calls.
    return SampleBatch(l2, plan.pairs, (1, 1) if plan.gate == "paper" else (a, b), plan.order)


def sample_bucket(
    run_a: Call, run_b: Call, device: torch.device, batch: SampleBatch, sink: Sink | None = None
) -> list[tuple[float, float]]:
    """Paired samples: (a, b) microseconds per call, one tuple a pair, in blocks of A B B A or B A A
    B at random.

    `sink` receives what the calls of b return (a deque with a length keeps the last ones);
    otherwise results die at once.
    """
    # Both sides go through a collector, so that both pay the same Python.
    runs = (
        (run_a, run_b)
        if sink is None
        else (_collect_into(deque(maxlen=0), run_a), _collect_into(sink, run_b))
    )
    sides = _order(batch)
    cold = batch.l2 == "cold" and device.type == "cuda"
    # A flush comes before each single call, so a sample of several is as many readings.
    schedule = [side for side in sides for _ in range(batch.calls[side])] if cold else sides
    readings = iter(
        choose_clock(device).read(
            runs, schedule, cold=cold, repeats=(1, 1) if cold else batch.calls
        )
    )
    costs = [
        sum(next(readings).wall_us for _ in range(batch.calls[side] if cold else 1))
        / batch.calls[side]
        for side in sides
    ]
    pairs = zip(sides[::2], costs[::2], costs[1::2], strict=True)
    return [
        (first_cost, second_cost) if leads == 0 else (second_cost, first_cost)
        for leads, first_cost, second_cost in pairs
    ]


def draw_leading_sides(batch: SampleBatch) -> list[int]:
    """Which side is first in each pair, in blocks of A B B A or B A A B."""
    leads: list[int] = []
    # The second pair of a block is in reverse, so that a steady drift cancels.
    while len(leads) < batch.pairs:
        first = _CHANCE.getrandbits(1)
        leads += (first, 1 - first) if batch.order == "abba" else (first,)
    return leads[: batch.pairs]


def _order(batch: SampleBatch) -> list[int]:
    """Which side each sample is of: two for a pair."""
    return [side for first in draw_leading_sides(batch) for side in (first, 1 - first)]


def _collect_into(sink: Sink, run: Call) -> Call:
    return lambda: sink.append(run())


def batch_us(run: Call, calls: int, device: torch.device, sink: Sink) -> float:
    """Microseconds of `calls` calls back to back, joined once; what they return goes to `sink`."""
    return choose_clock(device).read((_collect_into(sink, run),), (0,), repeats=(calls,))[0].wall_us


def time_queued_calls(
    begin: Callable[[], Call],
    calls: int,
    device: torch.device,
    sink: Sink,
    expected_us: float | None = None,
) -> QueuedTime:
    """The time between two events of the current stream around `calls` calls that all wait there
    before the first begins.

    A kernel that waits keeps the GPU busy meanwhile, `expected_us` a call and some more. So a slow
    or busy host is not in the time, unless a call waits for the GPU itself; what other streams do
    is not in it either. `begin`: what is called, from the same beginning each time it is asked:
    where the GPU had begun before all was queued, all is done again, after a longer wait. What
    calls return goes to `sink`.
    """
    host_us, spent_us, lead = calls * (expected_us or _QUEUED_US), math.nan, _LEAD
    for _ in range(_QUEUE_TRIES):
        host_us, spent_us, has_begun = _time_queue(begin(), calls, device, sink, host_us * lead)
        if not has_begun:
            break
        lead *= _LEAD
    return QueuedTime(spent_us, host_us / calls)


def _time_queue(
    run: Call, calls: int, device: torch.device, sink: Sink, lead_us: float
) -> tuple[float, float, bool]:
    """How long the host took to queue the calls, and the GPU to run them; whether it had begun with
    them by then.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Frees the results of the try before.
    sink.clear()
    # On an idle GPU the wait below begins at once.
    synchronise(device)
    begin = time.perf_counter()
    # Keeps the stream busy while the host queues: the host's launch time is then not between the
    # events.
    torch.cuda._sleep(int(lead_us * _CYCLES_PER_US))
    start.record()
    for _ in range(calls):
        sink.append(run())
    end.record()
    # The start event has passed already: the GPU ran ahead of the host and waited for it.
    has_begun = start.query()
    host_us = (time.perf_counter() - begin) * 1e6
    synchronise(device)
    return host_us, float(start.elapsed_time(end)) * 1e3, has_begun


def interleave(
    runs: Mapping[str, Call],
    device: torch.device,
    *,
    budget_s: float = 10.0,
    settle_s: float = _WARM_S,
    ran: bool = False,
) -> dict[str, list[float]]:
    """Time several callables in turn, each round in another random order: microseconds per call, 3
    to 30 cold samples each.

    `ran`: they have been called before and only their order is wanted: if all are slow, the call
    that settles one is a sample too, and five samples (two of slow calls) are enough where the
    fastest is far ahead of the others.
    """
    costs = {
        name: warm_up(run, device, settle_s=settle_s * (_RAN_SHARE if ran else 1))
        for name, run in runs.items()
    }
    # Ranking uses cold samples, each behind a flush.
    calls = {name: _choose_calls(cost, _SAMPLE_US, "cold") for name, cost in costs.items()}
    round_s = sum(costs[name].flushed_us * calls[name] for name in runs) / 1e6
    rounds = min(_ROUNDS, max(_FEWEST_ROUNDS, int(budget_s / max(round_s, 1e-9))))
    slow = ran and min((cost.call_us for cost in costs.values()), default=0.0) > _SLOW_US
    enough = 2 if slow else _ENOUGH_TO_RANK
    samples: dict[str, list[float]] = {name: [costs[name].call_us] if slow else [] for name in runs}
    end = time.perf_counter() + budget_s
    for number in range(int(slow), rounds):
        if (number >= _FEWEST_ROUNDS and time.perf_counter() > end) or (
            ran and number >= enough and _is_fastest_far_ahead(samples)
        ):
            break
        # Another order each round, so that no callable always follows the same one.
        for name in _CHANCE.sample(list(runs), len(runs)):
            samples[name].append(_sample(runs[name], calls[name], device))
    return samples


def measure_side(run: Call, device: torch.device) -> SideTimes:
    """Host and device time of a call apart, and whether it leaves work on streams that its own
    events do not wait for.
    """
    host_us = host_time_us(run, device)
    if device.type != "cuda":
        return SideTimes(host_us)
    ratio = sync_ratio(run, device)
    return SideTimes(host_us, measure_device_time_us(run, device), ratio)


def sync_ratio(run: Call, device: torch.device) -> float | None:
    """Time until every stream is joined over the time between a call's own events; None on the CPU,
    which has no device clock.
    """
    if device.type != "cuda":
        return None
    ratio = math.inf
    # A process beside this one can only raise the ratio; work on another stream is there each time.
    for _ in range(_LOOKS):
        ratio = min(ratio, _sync_ratio(run, device))
        if ratio < _SYNC_SURE:
            break
    return ratio


def host_time_us(run: Call, device: torch.device, *, calls: int = _EVENTS) -> float:
    """Median microseconds until a call returns, on an idle device; its device work is not waited
    for.
    """
    samples: list[float] = []
    clock = choose_clock(device)
    # Slow calls have little noise: a few of them are enough.
    while len(samples) < calls and (len(samples) < _FEWEST_ROUNDS or sum(samples) < _SLOW_US):
        samples += (reading.host_us for reading in clock.read((run,), (0,)))
        if samples[-1] > _SLOW_US:
            break
    return statistics.median(samples)


def measure_device_time_us(run: Call, device: torch.device, *, calls: int = _EVENTS) -> float:
    """Median microseconds between two events around a call with a cold L2 cache; 0.0 on the CPU,
    which has no device clock.
    """
    readings = (
        choose_clock(device).read((run,), [0] * calls, cold=True) if device.type == "cuda" else []
    )
    return statistics.median([reading.device_us or 0.0 for reading in readings] or [0.0])


def _sync_ratio(run: Call, device: torch.device) -> float:
    """After CUDA-L2's defence: a call and nothing at all in random order, each until its last event
    and until every stream's.

    Of the differences a low one counts: other processes on the device can only raise them.
    """
    # In random order, so that a drift of the machine's speed favours neither.
    readings = choose_clock(device).read(
        (run, lambda: None), _CHANCE.sample([0, 1] * _EVENTS, 2 * _EVENTS)
    )
    call_us = statistics.median(
        reading.device_us or 0.0 for reading in readings if reading.call == 0
    )
    joins = [
        # The lower quartile: other processes on the device can only raise a difference.
        sorted(r.wall_us - (r.device_us or 0.0) for r in readings if r.call == call)[_EVENTS // 4]
        for call in (0, 1)
    ]
    return 1 + max(0.0, joins[0] - joins[1] - _SYNC_SLACK_US) / max(call_us, 1e-3)


def _is_fastest_far_ahead(samples: Mapping[str, Sequence[float]]) -> bool:
    """Whether every sample of the fastest is well below every one of the others."""
    ordered = sorted(samples.values(), key=statistics.median)
    return all(min(other) > _FAR * max(ordered[0]) for other in ordered[1:])


def _choose_calls(side: WarmCosts, sample_us: float, l2: L2) -> int:
    calls = sample_us / max(side.call_us, 0.1)
    if l2 == "cold":
        # A flush takes longer than many calls: fewer of them, so that the measurement ends.
        calls = min(calls, _FLUSHED_SHARE * sample_us / max(side.flushed_us, 0.1))
    return max(1, min(_MOST_CALLS, math.ceil(calls)))


def _sample(run: Call, calls: int, device: torch.device) -> float:
    """Mean microseconds of one call out of `calls`: each by itself on a cold cache on CUDA, back to
    back on the CPU.
    """
    clock = choose_clock(device)
    if device.type == "cuda":
        return statistics.fmean(
            reading.wall_us for reading in clock.read((run,), [0] * calls, cold=True)
        )
    return clock.read((run,), (0,), repeats=(calls,))[0].wall_us / calls
