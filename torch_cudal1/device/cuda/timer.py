"""The C++ timer (csrc/timer.cpp): times calls in the order of a schedule.

`make_timer(device)` makes a timer. `timer.run(calls, schedule, flush, repeats)` calls `calls[i]`
(`repeats[i]` times, back to back) for each i of `schedule` and returns `(i, wall_us, host_us,
device_us)` for each: `wall_us` ends when every stream of the device has been joined, `host_us` when
the call has returned, and `device_us` lies between two events around the call on the current stream
(None on the CPU). Before each call it overwrites `flush`, an (address, bytes) of device memory, and
synchronises the device.
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
    # In C++, because a candidate that runs in this process could replace the clocks of Python's
    # `time` module (test_python_s_clocks_do_not_matter).
    native_timer: Timer = extension.Timer(addresses, index, raise_driver_error)
    return native_timer
