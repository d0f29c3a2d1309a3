"""The C++ timer (csrc/timer.cpp): calls in the order of a schedule, between clocks that no Python
code can replace or reach.

`make_timer(device)` makes one. `timer.run(calls, schedule, flush, repeats)` calls `calls[i]`
(`repeats[i]` times, back to back) for each i of `schedule` and returns for each
`(i, wall_us, host_us, device_us)`: until every stream of the device was joined, until the call
returned, and between two events around it on the current stream (None on the CPU). Before each call
the device is joined, after `flush`, an (address, bytes) of device memory, was overwritten. It takes
no medians, warms nothing up and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from torch_cudal1.core import native
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda.addresses import find_timer_addresses, raise_driver_error

__all__ = ["Timer", "make_timer"]


class Timer(Protocol):
    """`_native.Timer`."""

    def run(
        self,
        calls: tuple[Callable[[], Any], ...],
        schedule: Sequence[int],
        flush: tuple[int, int] | None = None,
        repeats: tuple[int, ...] = ...,
        /,
    ) -> list[tuple[int, float, float, float | None]]:
        """(call, wall, host and device microseconds) for each entry of the schedule. Raises what a
        call raises, or DriverError.
        """


def make_timer(device: torch.device) -> Timer | Refusal:
    """A timer for `device`; a Refusal says why there is none."""
    extension = native.extension()
    if extension is None:
        return Refusal(native.status()[1])
    addresses: tuple[int, ...] | Refusal | None = None
    index = 0
    if device.type == "cuda":
        addresses, index = (
            find_timer_addresses(device),
            torch.cuda.current_device() if device.index is None else device.index,
        )
    if isinstance(addresses, Refusal):
        return addresses
    native_timer: Timer = extension.Timer(addresses, index, raise_driver_error)
    return native_timer
