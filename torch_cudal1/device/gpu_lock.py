"""A lock of this machine for each GPU, so that one process at a time measures on it.

    /tmp/torch_cudal1-gpus/<UUID of the GPU>.lock        the folder has the mode of /tmp itself

It serves all users and caches that see that folder. The lock is flock's, which ends with the
process that holds it. Nothing is ever written to a lock file. A caller that has waited in vain runs
all the same and says so.

It does not keep other programs off the GPU, nor processes in a container with a /tmp of its own. It
does not make validation wait for timing either. That was tried: eight searches on one GPU waited
for most of their time (benchmarks/LOG.md, 2026-11-23).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from torch_cudal1.core.refusal import Refusal

__all__ = ["lock_gpu", "lock_seconds", "lock_uses", "working_s"]

# Not TMPDIR, which differs between the jobs of one machine.
_FOLDER = Path("/tmp/torch_cudal1-gpus")
# flock has no time limit, and only the main thread could interrupt it by a signal: so it is polled.
_POLL_INTERVAL_S = 0.01
# A process that is stopped while it holds the lock would cost every later caller the whole wait,
# each time (test_a_process_that_holds_it_and_is_stopped_costs_less_each_time).
_WAIT_FRACTION_AFTER_TIMEOUT = 0.1
# /tmp belongs to all users. O_NOFOLLOW: a link in the place of the lock would lead to any file.
# O_NONBLOCK: a pipe in its place must not make a caller wait. O_CLOEXEC: a program started
# meanwhile would hold the lock as long as it runs.
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Other processes may create and remove the file at the same time.
_MAX_OPEN_ATTEMPTS = 10
_timed_out_locks: set[str] = set()


class _Clock(threading.local):
    """Seconds that this thread has waited for locks, and held one, in all and by use."""

    def __init__(self) -> None:
        self.waited = self.held = 0.0
        self.uses: dict[str, float] = {}


_clock = _Clock()


@contextmanager
def lock_gpu(device: torch.device, use: str, *, wait_s: float = 60.0) -> Iterator[Refusal | None]:
    """Hold the GPU's timing lock around the body. The body also runs where the lock cannot be had:
    a Refusal then says why.

    `use`: the purpose in a word, for `lock_uses`. Not to be nested. The CPU has no lock: any
    program may load it, and the variance check sees that.
    """
    if device.type != "cuda":
        yield Refusal("not a CUDA device")
        return
    # By UUID: under another CUDA_VISIBLE_DEVICES the same GPU has another number.
    name = f"{torch.cuda.get_device_properties(device).uuid}.lock"
    patience_s = wait_s * _WAIT_FRACTION_AFTER_TIMEOUT if name in _timed_out_locks else wait_s
    begin = time.monotonic()
    try:
        descriptor = _acquire(name, patience_s)
        _clock.waited += time.monotonic() - begin
    except OSError as error:
        yield Refusal(f"no lock can be made: {error}")
        return
    if descriptor is None:
        _timed_out_locks.add(name)
        yield Refusal(f"another judge has timed on this GPU for {patience_s:g} s")
        return
    # The holder is gone, so the next wait is a full one again.
    _timed_out_locks.discard(name)
    begin = time.monotonic()
    try:
        yield None
    finally:
        # The lock goes with its last descriptor.
        os.close(descriptor)
        held_s = time.monotonic() - begin
        _clock.held += held_s
        _clock.uses[use] = _clock.uses.get(use, 0.0) + held_s


def lock_seconds() -> tuple[float, float]:
    """Seconds that this thread has waited for GPUs so far, and seconds that it held one."""
    return _clock.waited, _clock.held


def lock_uses() -> dict[str, float]:
    """Seconds that this thread held a GPU, by use."""
    return dict(_clock.uses)


def working_s() -> float:
    """Seconds on a clock that stops while this thread waits for a GPU that another process holds.
    Budgets of work are counted on it.
    """
    return time.monotonic() - _clock.waited


def _acquire(name: str, patience_s: float) -> int | None:
    """A descriptor that holds the lock of that name. None when another process has held it for
    `patience_s`. Raises OSError.
    """
    deadline = time.monotonic() + patience_s
    while True:
        descriptor = _open_lock_file(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and flock a clean-up of /tmp may have removed the file. A lock on a
            # removed file keeps no other process away.
            if _is_current_file(descriptor, name):
                return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(_POLL_INTERVAL_S)
        except OSError:
            os.close(descriptor)
            raise
        # Opened anew every time: a clean-up of /tmp may have removed the file.
        os.close(descriptor)


def _open_lock_file(name: str) -> int:
    """A descriptor of the lock file, which is created if it is absent. Raises OSError for anything
    but a plain file in a plain folder.
    """
    folder = _open_folder()
    try:
        for _ in range(_MAX_OPEN_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                # For reading: flock needs no more, so a file of another user serves as well.
                # Relative to the open folder, whose path could become a link in between.
                return _require_regular_file(
                    os.open(name, os.O_RDONLY | _OPEN_FLAGS, dir_fd=folder)
                )
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(
                    name, os.O_RDONLY | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o644, dir_fd=folder
                )
                # Whatever the umask: other users must be able to open it.
                os.fchmod(descriptor, 0o644)
                return descriptor
        raise OSError(errno.EAGAIN, f"{name} comes and goes in {_FOLDER}")
    finally:
        os.close(folder)


def _open_folder() -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(_FOLDER, 0o700)
        # mkdir's mode is cut by the umask. Sticky as /tmp is: every user may add a lock and none
        # may replace another user's.
        os.chmod(_FOLDER, 0o1777)
    # NOFOLLOW: another user could have put a link in the folder's place.
    return os.open(_FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _require_regular_file(descriptor: int) -> int:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"a lock in {_FOLDER} is no regular file; remove it")


def _is_current_file(descriptor: int, name: str) -> bool:
    """Whether the locked file still has that name."""
    try:
        return os.path.samestat(
            os.fstat(descriptor), os.stat(_FOLDER / name, follow_symlinks=False)
        )
    except FileNotFoundError:
        return False
