"""A read-write lock of a GPU across processes: any number of slots validate (shared), or one slot
times (exclusive).

Two file locks make it: `door` and `room`. A slot that validates passes the door and holds the room
shared. A slot that times holds the door shared, which keeps new validators out, and the room
exclusively. So several slots that wait to time do so one after the other, and the validators leave
once for all of them. With `gpu_lock.lock_gpu`, a slot that times has the GPU to itself among all
judges of this machine. Other programs are not kept away. Linux releases the locks when a process
ends.

A check makes dozens of requests. A validator therefore leaves between two requests when a slot
waits to time, and comes back after it.
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
    """The locks of one device in `folder`. Each slot needs its own object: file locks belong to the
    open file, so threads with one object would share them.

    `waited_s`: seconds spent waiting to come back, in total.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The UUID: an index depends on CUDA_VISIBLE_DEVICES, and processes may disagree about it.
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
        """Release all locks."""
        os.close(self._door)
        os.close(self._room)

    @contextmanager
    def hold_shared(self) -> Iterator[None]:
        """Run the body beside other validators, while no slot times."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def hold_exclusively(self) -> Iterator[None]:
        """Run the body while no other slot uses the device. Waits until the validators have left;
        other slots that time may come first.
        """
        with (
            # The door before the room: new validators must not come in while the others leave.
            _hold(self._door, fcntl.LOCK_SH),
            _hold(self._room, fcntl.LOCK_EX),
            # Against judges that use another folder, such as those of a search.
            lock_gpu(self._device, "training"),
        ):
            yield

    def give_way(self) -> None:
        """While validating, let slots that wait to time go first."""
        if self._sharing and self._is_wanted():
            self.pause_for(0.0)

    def pause_for(self, seconds: float) -> None:
        """Wait for `seconds`, with the lock released."""
        inside = self._sharing
        if inside:
            if self._device.type == "cuda":
                # Kernels of this process that still run would show in the samples of the other
                # slot.
                torch.cuda.synchronize(self._device)
            self._leave()
        time.sleep(seconds)
        if inside:
            begin = time.monotonic()
            self._enter()
            self.waited_s += time.monotonic() - begin

    def _enter(self) -> None:
        # Held only to pass: it waits while a slot holds it shared to time.
        with _hold(self._door, fcntl.LOCK_EX):
            fcntl.flock(self._room, fcntl.LOCK_SH)
        self._sharing = True

    def _leave(self) -> None:
        self._sharing = False
        fcntl.flock(self._room, fcntl.LOCK_UN)

    def _is_wanted(self) -> bool:
        """Whether a slot waits to time, or, by chance, another one is just passing the door."""
        try:
            fcntl.flock(self._door, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A validator that passes the door is taken for a slot that waits to time; that costs
        # little.
        except BlockingIOError:
            return True
        fcntl.flock(self._door, fcntl.LOCK_UN)
        return False


@contextmanager
def _hold(fd: int, how: int) -> Iterator[None]:
    fcntl.flock(fd, how)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
