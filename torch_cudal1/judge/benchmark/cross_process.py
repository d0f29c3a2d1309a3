"""Cross-process paired benchmark: two sides in two processes, timed on the parent's clock, for a
candidate in whose process nothing may be trusted, not even a clock.

Each side in turn runs its slot n times and an eighth as often. The cost of a call is the long batch
less the median of the short ones so far, over the difference of their calls, so that what a request
costs cancels, whatever the process claims. Caches stay hot: a flush would run in the process that
is not trusted. It judges no outputs: its caller keeps and reads them.

It does not stop a process that works between requests, on a thread or stream of its own, on what it
expects to be called with next.
"""

from __future__ import annotations

import math
import random
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.benchmark.protocol import Pairs
from torch_cudal1.judge.benchmark.timing import L2, SampleBatch, WarmCosts
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child

__all__ = [
    "BatchTimer",
    "ChildBatchTimer",
    "CrossProcessBenchmark",
    "TimedBatch",
    "TwoPointSlope",
    "check_wall_slope",
    "limit_batch_calls",
    "measure_slope",
]
_CHANCE = random.SystemRandom()  # a process that measures keeps the user's generators as they are

# a batch much shorter than this drowns in the jitter of its request; longer ones cost seconds
_BATCH_US = 7_000.0
_SHORT = 8  # as long as this many short ones
_MOST_CALLS = 5_000
# What a batch may keep in the child's memory.
_KEPT_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}
_WARM_CALLS = 3
# a single one that something else delays would make all batches of the measurement short
_LOOKS = 3
# each with twice the calls: 7 ms become seconds, beside which even a machine with seven others at
# work is quiet
_TRIES = 8
_WITHIN, _WITHIN_US = 0.10, 5.0  # how far the two clocks may be apart
_FAR_RATIO = 2.0  # of what a call took in its batch: a slope beyond is no measurement
_CONSISTENT = 0.8  # of the slopes, in which a false clock is that far off


@dataclass(frozen=True)
class TimedBatch:
    """A batch of calls: seconds on the clock of the requesting process, and microseconds claimed by
    the process that ran them.
    """

    wall_s: float
    claimed_us: float
    calls: int


@dataclass(frozen=True)
class TwoPointSlope:
    """Microseconds per call from batches of two lengths: by this clock, by the other process's; and
    the mean of the longer one.
    """

    wall_us: float
    claimed_us: float
    mean_us: float


class BatchTimer(Protocol):
    """One side of a benchmark, alone in its process. `max_calls`: how many calls a batch may
    have (their outputs are kept).
    """

    @property
    def max_calls(self) -> int: ...

    def time_batch(self, calls: int) -> TimedBatch:
        """Run the slot `calls` times on its rotating input sets, wait for the device, and come
        back.

        The implementation reads its own monotonic clock right before the request and right after
        the answer. Raises CandidateFailure.
        """
        ...


@dataclass
class ChildBatchTimer:
    """A slot of a child. Every batch starts at another of the rotating input sets and keeps all its
    outputs, so none can be left out.

    `held_outputs`: how many outputs of the last batch are held in the child, number i (for the verb
    `reread`) from the call on input set `start` + i. `shift`: how far the values of the sets are
    rotated. `drops_inline`: what the batch before kept is dropped by the same request, which then
    takes longer on this clock; for callers that read the other process's clock. `queued`: what that
    one claims is the GPU's time alone, see `timing.time_queued_calls`.
    """

    child: Child
    slot: str
    sets: Sequence[str]
    max_calls: int = _MOST_CALLS
    keep: bool = True
    deadline_s: float | None = None
    shift: int = 0
    start: int = 0
    held_outputs: int = 0
    drops_inline: bool = False
    queued: bool = False
    _turned: int | None = None

    def time_batch(self, calls: int) -> TimedBatch:
        """Ask for a batch; what the one before kept is dropped and the sets rotated first, outside
        the clock.

        The very first batch makes the sets, and its first call is the instance's: both are in its
        time. Raises CandidateFailure.
        """
        # Rotating the sets copies their values, in the request that comes with another shift: a
        # batch of one call takes that time off the clock.
        turned, self._turned = self._turned, self.shift
        if turned is not None and turned != self.shift:
            self._request_batch(1)
        return self._request_batch(calls)

    def _request_batch(self, calls: int) -> TimedBatch:
        # Freeing what the batch before kept takes time too: outside the clock, in a request of its
        # own.
        if self.held_outputs and not self.drops_inline:
            self.child.call("drop", names=[])
        # Which inputs the first call gets is not known before the request.
        self.start = secrets.randbelow(1 << 16)
        fields = {"slot": self.slot, "sets": list(self.sets), "calls": calls, "start": self.start}
        fields |= {"drop": self.drops_inline, "queued": self.queued}
        # This process's clock on both sides of the request: nothing in the child can patch it.
        begin = time.monotonic()
        answer = self.child.call(
            "spin", deadline_s=self.deadline_s, shift=self.shift, keep=self.keep, **fields
        )
        wall_s = time.monotonic() - begin
        try:
            claimed_us = float(answer["elapsed_us"])
        except (KeyError, TypeError, ValueError) as error:
            raise CandidateFailure(
                "timing", f"an answer without a time: {error}", "protocol"
            ) from error
        self.held_outputs = calls if self.keep else 0
        return TimedBatch(wall_s, claimed_us, calls)


@dataclass
class _Side:
    """A batch timer with what its short batches took so far, by their length: seconds here, and
    microseconds claimed.
    """

    timer: BatchTimer
    min_calls: int = 1  # calls that outlast the jitter of a request
    slopes: list[TwoPointSlope] = field(default_factory=list)
    request_us: list[float] = field(default_factory=list)
    short_batches: dict[int, list[TimedBatch]] = field(default_factory=dict)

    def measure_slope(self, calls: int) -> tuple[TwoPointSlope, TimedBatch]:
        """The cost of a call from a batch of `calls`, and that batch. Raises CandidateFailure."""
        calls = max(2, min(calls, self.timer.max_calls))
        few = max(1, calls // _SHORT)
        # In random order, so that a drift of the machine's speed favours neither length.
        timed = {size: self.timer.time_batch(size) for size in _CHANCE.sample((few, calls), 2)}
        batch, earlier = timed[calls], self.short_batches.setdefault(few, [])
        earlier.append(timed[few])
        # The median of all short batches so far: a difference of two single times has the noise of
        # both.
        few_us = statistics.median(each.wall_s for each in earlier) * 1e6
        wall_us = (batch.wall_s * 1e6 - few_us) / (calls - few)
        claimed_us = (batch.claimed_us - statistics.median(each.claimed_us for each in earlier)) / (
            calls - few
        )
        self.slopes.append(TwoPointSlope(wall_us, claimed_us, batch.wall_s * 1e6 / calls))
        self.request_us.append(few_us - few * wall_us)
        return self.slopes[-1], batch


class CrossProcessBenchmark:
    """Two batch timers as a `Sampler`, baseline first."""

    temperatures: tuple[L2, ...] = ("hot",)

    def __init__(self, baseline: BatchTimer, candidate: BatchTimer) -> None:
        self._sides = (_Side(baseline), _Side(candidate))

    @property
    def slopes(self) -> tuple[list[TwoPointSlope], list[TwoPointSlope]]:
        """What both clocks said of either side so far."""
        return self._sides[0].slopes, self._sides[1].slopes

    def warm_up(self) -> tuple[WarmCosts, WarmCosts]:
        """First call, then batches of growing length until one lasts long enough. Raises
        CandidateFailure.
        """
        costs = _warm_up(self._sides[0].timer), _warm_up(self._sides[1].timer)
        for side, cost in zip(self._sides, costs, strict=True):
            # A batch much shorter than this drowns in the jitter of its request.
            side.min_calls = math.ceil(_BATCH_US / cost.call_us)
        return costs

    def take_samples(self, batch: SampleBatch) -> Pairs:
        """Pairs of costs on the parent's clock. Raises CandidateFailure."""
        pairs: Pairs = []
        calls = self._balance_calls(batch.calls)
        while len(pairs) < batch.pairs:
            # Which side leads is random; in "abba" the second pair is in reverse, so that a steady
            # drift cancels.
            first = _CHANCE.random() < 0.5
            orders = (first, not first) if batch.order == "abba" else (first,)
            for leads in orders[: batch.pairs - len(pairs)]:
                costs = {
                    side: self._measure_cost(side, calls[side])
                    for side in ((0, 1) if leads else (1, 0))
                }
                pairs.append((costs[0], costs[1]))
        return pairs

    def settle(self) -> None:
        """One untimed call of either side, after a change of the place they run at.
        Raises CandidateFailure.
        """
        for side in self._sides:
            side.timer.time_batch(1)

    def check(self) -> CheckResult:
        """`wall_slope` of the candidate over the whole measurement."""
        return check_wall_slope(self.slopes[1])

    def _balance_calls(self, calls: tuple[int, int]) -> tuple[int, int]:
        """Calls of either side's long batches: as many, but where one is twice as fast or more, and
        the ratio is far from deciding.

        What a batch keeps makes a call the dearer the longer it is: new memory, and caches that
        hold other things.
        """
        # What a batch keeps makes its later calls dearer (new memory, colder caches), so both sides
        # get as many calls, unless one is twice as fast or more.
        needed = [
            max(count, side.min_calls) for count, side in zip(calls, self._sides, strict=True)
        ]
        return min(max(needed), 2 * needed[0]), min(max(needed), 2 * needed[1])

    def _measure_cost(self, side: int, calls: int) -> float:
        timed_side, baseline = self._sides[side], self._sides[0]
        for attempt in range(_TRIES):
            slope, batch = timed_side.measure_slope(calls << attempt)
            # More calls that take less time are noise of a busy machine: the next try is twice as
            # long.
            if slope.wall_us > 0:
                if timed_side is baseline or not baseline.request_us:
                    return slope.wall_us
                # A candidate that is slow in short batches only would seem fast. Of what its batch
                # takes, no more is taken off than a request to the baseline's process costs.
                request_us = max(0.0, statistics.median(baseline.request_us))
                return max(slope.wall_us, (batch.wall_s * 1e6 - request_us) / batch.calls)
        raise CandidateFailure(
            "timing",
            f"more calls took no longer, {_TRIES} times: the machine is too busy",
            "unstable",
        )


def measure_slope(timer: BatchTimer, calls: int) -> TwoPointSlope:
    """Cost of a call from batches of k and 2k in random order, so that the cost of a request
    cancels.

    On a busy machine it may come out wrong, even negative, but wrong on both clocks alike. Raises
    CandidateFailure.
    """
    calls = max(1, min(calls, timer.max_calls // 2))
    # In random order, so that a drift of the machine's speed favours neither length.
    timed = {size: timer.time_batch(size) for size in _CHANCE.sample((calls, 2 * calls), 2)}
    once, twice = timed[calls], timed[2 * calls]
    wall_us, claimed_us = (
        (twice.wall_s - once.wall_s) * 1e6 / calls,
        (twice.claimed_us - once.claimed_us) / calls,
    )
    return TwoPointSlope(wall_us, claimed_us, twice.wall_s * 1e6 / (2 * calls))


def limit_batch_calls(output_bytes: int, device: torch.device) -> int:
    """How many calls a batch may have when their outputs, of so many bytes together, are all kept;
    at least 2.
    """
    return max(2, min(_MOST_CALLS, _KEPT_BYTES[device.type] // max(1, output_bytes)))


def check_wall_slope(slopes: Sequence[TwoPointSlope]) -> CheckResult:
    """Whether the two clocks tell one time per call: the median difference is at most 10 % or 5 us,
    whichever is more, or no four fifths of the differences are beyond that on one side.
    """
    wall_us = statistics.median(each.wall_us for each in slopes)
    claimed_us = statistics.median(each.claimed_us for each in slopes)
    differences = [each.wall_us - each.claimed_us for each in slopes]
    difference = abs(statistics.median(differences))
    # An absolute term as well: 10 % of a call of a few microseconds is less than the jitter of a
    # request.
    mean_us = statistics.median(each.mean_us for each in slopes)
    limit = max(_WITHIN * mean_us, _WITHIN_US)
    detail = (
        f"{wall_us:.2f} us a call by the judge's clock, {claimed_us:.2f} us by the process's own"
    )
    # Requests wait for milliseconds on a busy machine, longer batches more often, and an honest
    # candidate was off by 58 us a call. A false clock is as far off in each.
    least = _CONSISTENT * len(differences)
    is_false = any(
        sum(sign * each > limit for each in differences) >= least for sign in (1.0, -1.0)
    )
    if difference > limit and not is_false:
        detail += ", from batch to batch otherwise: the machine is busy"
    # Two batches of which the longer one took hardly longer say nothing of a call.
    elif not is_false and not mean_us / _FAR_RATIO <= wall_us <= mean_us * _FAR_RATIO:
        detail += f", {mean_us:.2f} us in its batch: the machine is busy"
    return CheckResult("wall_slope", difference <= limit or not is_false, difference, limit, detail)


def _warm_up(timer: BatchTimer) -> WarmCosts:
    # The first call alone: compilation and set-up are in it and in no sample.
    first_us = timer.time_batch(1).wall_s * 1e6
    for _ in range(_WARM_CALLS):
        timer.time_batch(1)
    calls = 1
    while True:
        # The shortest of a few: one that something delays would end the growth too early.
        took_us = min(timer.time_batch(calls).wall_s for _ in range(_LOOKS)) * 1e6
        if took_us >= _BATCH_US / 2 or 2 * calls > timer.max_calls:
            cost = took_us / calls
            return WarmCosts(first_us, cost, cost)
        calls *= 2
