"""Accept or reject: pure functions of evidence and policy. They measure nothing and touch nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch_cudal1.records import SCHEDULES, Accepted, Check, Decision, Rejected, Timing, Verdict
from torch_cudal1.settings import Settings

__all__ = ["choose_baseline", "conservative", "decide"]

_TIE = 0.02  # medians closer than this are one speed; the simpler schedule then wins


def decide(verdict: Verdict, timing: Timing | None, settings: Settings) -> Decision:
    """Accepted only if every check passed, the lower bound reaches `settings.margin` and a call saves `settings.min_saving_us`."""
    failure = verdict.failure
    if failure is not None:
        return Rejected(_told(failure), failure.name, _numbers(failure))
    if not verdict.passed:
        return Rejected("nothing was checked", "protocol")
    if timing is None:
        return Rejected("right, but never timed", "timing")
    if timing.low < settings.margin:
        reason = (
            f"speed-up over {timing.baseline} is {timing.speedup:.3f}, at least {timing.low:.3f}; a swap needs {settings.margin:g}"
        )
        return Rejected(reason, "timing", {"speedup": timing.speedup, "low": timing.low, "high": timing.high}, timing)
    if timing.saved_us < settings.min_saving_us:
        reason = f"saves {timing.saved_us:.2f} us a call; a swap needs {settings.min_saving_us:g}"
        return Rejected(reason, "timing", {"saved_us": timing.saved_us}, timing)
    return Accepted(timing)


def conservative(speedup: float) -> float:
    """Two decimals, rounded towards 1 (CUDA-L1 paper, reward rules): 1.118 -> 1.11, 0.992 -> 1.00, 2.30 -> 2.30."""
    cents = round(speedup * 100, 4)  # six decimals of the speed-up first, or 2.30 would fall to 2.29
    return (math.floor(cents) if speedup >= 1 else min(100, math.ceil(cents))) / 100


def choose_baseline(medians_us: Mapping[str, float]) -> str:
    """The schedule with the smallest median; of those within 2 % of it, the earliest of `SCHEDULES`. Raises ValueError if empty."""
    if not medians_us:
        raise ValueError("no baseline was measured; eager can always run, so its failure must be looked at first")
    best = min(medians_us.values())
    near = [name for name, value in medians_us.items() if value <= best * (1 + _TIE)]
    return min(near, key=SCHEDULES.index)


def _told(check: Check) -> str:
    if check.detail or check.value is None:
        return check.detail or f"check {check.name!r} failed"
    return f"{check.name}: {check.value:.4g} exceeds {check.limit if check.limit is None else format(check.limit, '.4g')}"


def _numbers(check: Check) -> dict[str, float]:
    pairs = (("value", check.value), ("limit", check.limit))
    return {name: number for name, number in pairs if number is not None and math.isfinite(number)}
