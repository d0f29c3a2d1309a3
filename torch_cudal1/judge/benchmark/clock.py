"""The one clock: what a callable takes in this process, by the C++ timer, or by Python's clock and
events without the extension.

Python code can replace Python's clocks and events; the C++ timer it cannot reach (csrc/timer.cpp).
Either way every call is joined with all streams of the device before and after, and both clocks
mean the same. What to sample is for `judge.benchmark.timing` to say, whether to believe a process
at all for `judge.benchmark.cross_process`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeAlias

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda.timer import Timer, make_timer

__all__ = ["Call", "Clock", "Reading", "choose_clock", "synchronise"]

Call: TypeAlias = Callable[[], object]
# As much as Triton's `do_bench` flushes; more where twice the L2 cache is more.
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Reading:
    """Microseconds of one sample: until every stream was joined, until the call returned, and
    between events (None on the CPU).
    """

    call: int
    wall_us: float
    host_us: float
    device_us: float | None = None


class Clock(Protocol):
    """Reads samples of callables in the order of a schedule."""

    def read(
        self,
        calls: Sequence[Call],
        schedule: Sequence[int],
        *,
        cold: bool = False,
        repeats: Sequence[int] = (),
    ) -> list[Reading]:
        """One reading for each number of the schedule.

        `repeats[i]`: how often `calls[i]` is called in one sample, back to back (once by default);
        the times are of all of them. `cold`: the L2 cache is flushed before each sample, outside
        the clock. What a call returns dies at once, the last one's after the clock stopped. Raises
        what a call raises.
        """
        ...


@dataclass(frozen=True)
class _NativeClock:
    device: torch.device
    timer: Timer

    def read(
        self,
        calls: Sequence[Call],
        schedule: Sequence[int],
        *,
        cold: bool = False,
        repeats: Sequence[int] = (),
    ) -> list[Reading]:
        flush = None
        # A CPU's caches stay hot: there is no portable flush.
        if cold and self.device.type == "cuda":
            buffer = _flush_buffer(self.device)
            flush = (buffer.data_ptr(), buffer.numel())
        often = tuple(repeats) or (1,) * len(calls)
        return [Reading(*sample) for sample in self.timer.run(tuple(calls), schedule, flush, often)]


@dataclass(frozen=True)
class _PythonClock:
    device: torch.device

    def read(
        self,
        calls: Sequence[Call],
        schedule: Sequence[int],
        *,
        cold: bool = False,
        repeats: Sequence[int] = (),
    ) -> list[Reading]:
        often = tuple(repeats) or (1,) * len(calls)
        return [self._sample(calls[index], index, often[index], cold) for index in schedule]

    def _sample(self, call: Call, index: int, repeats: int, cold: bool) -> Reading:
        if self.device.type == "cuda":
            return self._on_device(call, index, repeats, cold)
        begin = time.perf_counter_ns()
        result = _call_repeatedly(call, repeats)
        host_us = (time.perf_counter_ns() - begin) / 1e3
        del result
        return Reading(index, host_us, host_us)

    def _on_device(self, call: Call, index: int, repeats: int, cold: bool) -> Reading:
        # Before the join below, so that the flush is not in the time.
        if cold:
            _flush_buffer(self.device).zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Work that was queued before would run inside the clock.
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter_ns()
        start.record()
        result = _call_repeatedly(call, repeats)
        host_us = (time.perf_counter_ns() - begin) / 1e3
        end.record()
        # Joins every stream of the device, not only the current one: work hidden on a side stream
        # would otherwise be missing from the time.
        torch.cuda.synchronize(self.device)
        wall_us = (time.perf_counter_ns() - begin) / 1e3
        # After the clock stopped: freeing a result is not part of a call.
        del result
        return Reading(index, wall_us, host_us, float(start.elapsed_time(end)) * 1e3)


@cache
def choose_clock(device: torch.device) -> Clock:
    """The best clock of this process for `device`."""
    native = make_timer(device)
    return _PythonClock(device) if isinstance(native, Refusal) else _NativeClock(device, native)


def synchronise(device: torch.device) -> None:
    """Wait for everything on the device, every stream; nothing to do on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _call_repeatedly(call: Call, repeats: int) -> object:
    # Earlier results die at once, as in a loop of calls; the last one is returned so that it dies
    # outside the clock.
    for _ in range(repeats - 1):
        call()
    return call()


# Allocated once a device: an allocation before each sample would disturb the caching allocator.
@cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    # Twice the L2 cache, so that nothing of it survives.
    size = max(_FLUSH_BYTES, 2 * torch.cuda.get_device_properties(device).L2_cache_size)
    return torch.empty(size, dtype=torch.uint8, device=device)
