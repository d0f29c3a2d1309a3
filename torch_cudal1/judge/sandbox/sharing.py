"""`DeviceSharing`: what a judge does between two requests to a child, for other processes on the
same device. By default, nothing.

A pool that judges several candidates on one device passes a subclass (`judge.pool.gpu_rw_lock`). A
process that waits for the device then waits for one request, not for a whole check.
"""

from __future__ import annotations

import time

__all__ = ["DeviceSharing"]


class DeviceSharing:
    """For a judge that knows of no other process on the device."""

    def give_way(self) -> None:
        """Called before each request."""

    def pause_for(self, seconds: float) -> None:
        """Wait for `seconds`, and send no request meanwhile."""
        time.sleep(seconds)
