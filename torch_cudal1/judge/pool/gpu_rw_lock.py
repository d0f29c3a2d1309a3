"""Who may use a GPU now: any number of lanes that validate, or one that times, in however many
processes.

Lanes that want to time share the door, which keeps those out that come to validate; so when the
room has emptied they time one after the other, and emptying it costs once for all of them. Together
with `gpu_lock.lock_gpu` the one that times has the GPU to itself among all judges of this machine.
Other programs are not kept away. The locks end with the processes that hold them.

Emptying it would take as long as the longest of the detectors inside, some dozens of requests: so
those inside leave between two requests where somebody waits to time, and come back after that.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from torch_cudal1.device.gpu_lock import lock_gpu
from torch_cudal1.judge.sandbox.sharing import DeviceSharing

__all__ = ["GpuReadWriteLock"]


class GpuReadWriteLock(DeviceSharing):
    """The locks of one device in `folder`. One object a lane: its threads would share what it
    holds.

    `waited_s`: how long it took to come back, all times together.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = (
            str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
        )
        self._device = device
        self._sharing = False
        self.waited_s = 0.0
        self._door, self._room = (
            os.open(folder / f"{part}-{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            for part in ("door", "room")
        )

    def close(self) -> None:
        """Let go of everything."""
        os.close(self._door)
        os.close(self._room)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Work on the device beside others, while nobody times."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Work on the device while nobody else does. Waits until those inside have left; only
        others like it come in meanwhile.
        """
        with (
            _held(self._door, fcntl.LOCK_SH),
            _held(self._room, fcntl.LOCK_EX),
            lock_gpu(self._device, "training"),
        ):
            yield

    def give_way(self) -> None:
        """Inside beside others, let those go first who wait to time."""
        if self._sharing and self._wanted():
            self.rest(0.0)

    def rest(self, seconds: float) -> None:
        """Do nothing for so long, outside."""
        inside = self._sharing
        if inside:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # what this process has begun there
            self._leave()
        time.sleep(seconds)
        if inside:
            begin = time.monotonic()
            self._enter()
            self.waited_s += time.monotonic() - begin

    def _enter(self) -> None:
        with _held(self._door, fcntl.LOCK_EX):
            fcntl.flock(self._room, fcntl.LOCK_SH)
        self._sharing = True

    def _leave(self) -> None:
        self._sharing = False
        fcntl.flock(self._room, fcntl.LOCK_UN)

    def _wanted(self) -> bool:
        """Whether somebody is at the door; by chance one who comes to validate, which costs little."""
        try:
            fcntl.flock(self._door, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._door, fcntl.LOCK_UN)
        return False


@contextmanager
def _held(fd: int, how: int) -> Iterator[None]:
    fcntl.flock(fd, how)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
