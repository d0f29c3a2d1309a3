"""Where the GPU's microseconds of a call go: its kernels by name, as torch.profiler sees them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["list_kernel_shares"]

_CALLS = 5
_MOST_KERNELS = 40


def list_kernel_shares(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """What a call's kernels, copies and fills take: `busy_us` all of them, `kernels` the longest
    ones as [name, how many a call, microseconds a call], `other_us` the rest. Of nothing on a CPU.
    """
    durations: defaultdict[str, list[float]] = defaultdict(list)
    if device.type == "cuda":
        # Device activity alone: recording the host's side makes calls of many operators slower.
        with profile(activities=[ProfilerActivity.CUDA]) as recording:
            for _ in range(_CALLS):
                call()
            torch.cuda.synchronize(device)
        for event in recording.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                durations[event.name].append(event.device_time)
    shares = sorted(
        (
            [name, len(times) / _CALLS, round(sum(times) / _CALLS, 3)]
            for name, times in durations.items()
        ),
        key=lambda share: -float(share[2]),
    )
    return {
        "busy_us": round(sum(float(share[2]) for share in shares), 3),
        "kernels": shares[:_MOST_KERNELS],
        "other_us": round(sum(float(share[2]) for share in shares[_MOST_KERNELS:]), 3),
    }
