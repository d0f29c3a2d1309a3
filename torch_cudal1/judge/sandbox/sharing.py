"""What a judge does between two requests to a child for others who use the same device: nothing,
unless it knows of some.

Whoever judges side by side with others gives the child a `DeviceSharing` of its own
(`judge.pool.gpu_rw_lock`); then those who wait for the device need not wait for the end of a
detector.
"""

from __future__ import annotations

import time

__all__ = ["DeviceSharing"]


class DeviceSharing:
    """Of a judge that shares the device with nobody it knows of."""

    def give_way(self) -> None:
        """Before each request."""

    def rest(self, seconds: float) -> None:
        """Do nothing for so long."""
        time.sleep(seconds)
