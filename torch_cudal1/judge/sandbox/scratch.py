"""Scratch folders of children, and those that an ended judge has left behind.

A judge that is killed cannot remove its folders, in which there may be gigabytes of shared memory. So
each folder has a lock file beside it, which its judge holds for as long as it lives: a folder whose
lock is free has no owner, and the next judge of the same user removes it. `flock` itself, as a lock
of the package filelock is released by a forked process that ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from torch_cudal1.core.errors import SandboxError

__all__ = ["make_scratch", "remove_orphans", "remove_scratch"]

_ROOMY_BYTES = 8 << 30
_MIN_AGE_S = 10.0
_SHARED_MEMORY = Path("/dev/shm")
# Of lock files. A folder itself has a name as any temporary one: a source learns from its path
# nothing of who has imported it.
_PREFIX, _SUFFIX = ".cudal1-", ".lock"
# Descriptors of lock files, open until `remove_scratch` or until this process ends.
_locks: dict[Path, int] = {}


def make_scratch() -> Path:
    """A new folder that only this user may enter. Raises SandboxError."""
    # Memory, not disk, where there is enough of it: tensors go through this folder.
    try:
        roomy = (
            os.access(_SHARED_MEMORY, os.W_OK)
            and shutil.disk_usage(_SHARED_MEMORY).free >= _ROOMY_BYTES
        )
        parent = _SHARED_MEMORY if roomy else Path(tempfile.gettempdir())
        _remove_orphans_once(os.getpid())
        folder = Path(tempfile.mkdtemp(dir=parent))
        try:
            # Beside the folder: what runs in it may write there.
            _locks[folder] = _lock_file(_find_lock_file(folder))
        except BaseException:
            # Without a lock file no later judge would know whose it is.
            folder.rmdir()
            raise
    except OSError as error:
        raise SandboxError("starting", f"no scratch folder: {error}") from error
    return folder


def remove_scratch(folder: Path) -> None:
    """Remove a folder of `make_scratch` with all that is in it. Safe to call twice."""
    shutil.rmtree(folder, ignore_errors=True)
    lock = _locks.pop(folder, None)
    if lock is not None:
        _find_lock_file(folder).unlink(missing_ok=True)
        os.close(lock)


def remove_orphans(parent: Path) -> list[Path]:
    """Remove the folders in `parent` that judges of this user have left behind; those that were
    removed.
    """
    removals: list[Path] = []
    for path in parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        # Another user's, or just removed by another judge.
        with suppress(OSError):
            status = path.lstat()
            # Between its creation and its lock another judge's file is free for a moment.
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _MIN_AGE_S:
                continue
            lock = _lock_file(path)
            try:
                folder = path.with_name(path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX))
                shutil.rmtree(folder, ignore_errors=True)
                path.unlink(missing_ok=True)
                removals.append(folder)
            finally:
                os.close(lock)
    return removals


def _lock_file(path: Path) -> int:
    """A descriptor that holds the lock until it is closed. Raises OSError if another one does."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _find_lock_file(folder: Path) -> Path:
    return folder.with_name(f"{_PREFIX}{folder.name}{_SUFFIX}")


@cache
def _remove_orphans_once(process: int) -> None:
    for parent in {_SHARED_MEMORY, Path(tempfile.gettempdir())}:
        if parent.is_dir():
            remove_orphans(parent)
