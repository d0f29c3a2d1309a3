"""Files that are there whole or not at all: atomic writes, bounded reads, locks, and the removal of
what a killed writer left.

Concurrency: a writer holds the file's lock (flock, so a dead process holds nothing), writes a
temporary file beside it, syncs it and renames it over the name. Readers take no lock: they see the
old file, the new one, or none. A process that gets a file's lock may therefore delete the temporary
files of that name, and the next writer of the name does. Where a file system has no locks the
rename alone keeps files whole, and only `purge` elsewhere finds leftovers. No clock is read, so a
skewed clock changes nothing.

A network file system may answer that a handle is stale, or that a rename failed which took place:
the first is tried again, the second is seen by reading the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import inspect
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from filelock import BaseFileLock, FileLock

from torch_cudal1.core.errors import SupplyError
from torch_cudal1.core.refusal import Refusal

__all__ = [
    "LockState",
    "Stored",
    "hold_lock",
    "iter_files",
    "read_file",
    "remove_leftovers",
    "size_of",
    "write_atomically",
    "write_file",
]

# A writer holds it for milliseconds; longer means a frozen process or a file system that hangs.
_WRITE_LOCK_S = 30.0
_TEMPORARY = ".tmp"
# ESTALE: the server of a network file system dropped the handle. ENOENT: another process removed
# the folder between its creation and the write.
_TRANSIENT = (
    errno.ESTALE,
    errno.ENOENT,
)
# Before the second and the third attempt.
_PAUSES_S = (0.02, 0.2)
_T = TypeVar("_T")
# Without flock some versions lock by the existence of the file, which an old lock file then holds
# for ever. No lock is better.
_FLOCK_ONLY: dict[str, Any] = (
    {"fallback_to_soft": False}
    if "fallback_to_soft" in inspect.signature(BaseFileLock.__init__).parameters
    else {}
)


@dataclass(frozen=True)
class Stored:
    """The file is on the disk, whole and synced."""

    path: Path


@dataclass(frozen=True)
class LockState:
    """Whether the lock is held; if not, why (read-only folder, time-out), and the caller works
    without exclusion.
    """

    held: bool
    reason: str = ""


def write_file(path: Path, data: bytes) -> Stored | Refusal:
    """Replace `path` by `data` in one step. Any refusal of the file system (read-only, full, quota,
    ...) is a Refusal.
    """
    try:
        _retry_transient(lambda: _write(path, data))
    except OSError as error:
        return Refusal(f"{path} was not written: {type(error).__name__}: {error}")
    return Stored(path)


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file that becomes `path` when the body ends without an error, and is deleted when it raises.

    For a file that a user names and takes elsewhere (a bundle, a lock). Unlike `write_file` no
    writer waits for another: the last one to end wins. Raises SupplyError where the disk refuses.
    """
    # Beside the target, because rename(2) is atomic within one file system only. Random digits,
    # because process ids repeat across containers that share the folder.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        # Before this writer's own file exists: until its lock is taken the removal would match it.
        _remove_abandoned(path)
        # Exclusive creation: an existing file of this name, or a link, is never written through.
        with open(temporary, "xb") as file:
            # Without locks on this file system, `_remove_abandoned` can not tell a killed writer's
            # file from a living writer's, and leaves both.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock is held while the body writes: another writer's `_remove_abandoned` spares
            # the file.
            yield file
            # Synced before the rename: after a crash the name must not stand for a file whose bytes
            # never reached the disk.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise SupplyError(
            path, "disk", f"{type(error).__name__}: {error}; nothing was written"
        ) from error
    finally:
        # After a rename it is not there any more.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_file(path: Path, limit_bytes: int) -> bytes | Refusal:
    """The bytes of `path`: Refusal("absent") when there is no such file, Refusal("unreadable: ...")
    when it is too large or refused.
    """
    try:
        # ENOENT is not tried again here: an absent file is the ordinary miss, and must cost no
        # pause.
        return _retry_transient(lambda: _read(path, limit_bytes), (errno.ESTALE,))
    except (FileNotFoundError, NotADirectoryError):
        return Refusal("absent")
    except OSError as error:
        return Refusal(f"unreadable: {type(error).__name__}: {error}")


@contextlib.contextmanager
def hold_lock(path: Path, timeout_s: float) -> Iterator[LockState]:
    """Hold the lock file `path` among threads and processes; the same thread may hold it twice."""
    # A singleton, so that the same thread may hold it twice.
    lock = FileLock(path.absolute(), is_singleton=True, **_FLOCK_ONLY)
    state = LockState(True)
    try:
        _make_folder(path.parent)
        lock.acquire(timeout=timeout_s)
    except (OSError, NotImplementedError) as error:
        # filelock.Timeout is an OSError too.
        state = LockState(False, f"{type(error).__name__}: {error}")
    try:
        yield state
    finally:
        if state.held:
            lock.release()


def iter_files(root: Path, suffix: str) -> Iterator[Path]:
    """Files below `root` whose name ends with `suffix`, in path order; folders that vanish or
    refuse are skipped.
    """
    for folder, subfolders, names in os.walk(root):
        subfolders.sort()
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(suffix))


def size_of(path: Path) -> int:
    """Bytes of a file, 0 for one that is gone: others may be deleting what is being counted."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def remove_leftovers(root: Path) -> tuple[Path, ...]:
    """Delete the temporary files below `root` that no living writer owns; returns what was deleted."""
    removed: list[Path] = []
    # A list, because the loop deletes from the folders that the walk reads.
    for temporary in list(iter_files(root, _TEMPORARY)):
        if not temporary.name.startswith("."):
            # Files of other programs may end with ".tmp" too; those of this package are hidden.
            continue
        # The name is ".<target>.<pid>.<random>.tmp"; the target's name may hold dots itself.
        target = temporary.with_name(temporary.name.removeprefix(".").rsplit(".", 3)[0])
        with (
            contextlib.suppress(OSError, NotImplementedError),
            # No waiting: a lock that is held means that a writer lives, and its file stays.
            FileLock(_lock_path(target), timeout=0, **_FLOCK_ONLY),
        ):
            temporary.unlink()
            removed.append(temporary)
    return tuple(removed)


def _make_folder(folder: Path) -> None:
    """Folders of a new cache are the owner's alone: an entry holds machine code that this user will
    run.
    """
    # `mkdir(parents=True)` gives the mode to the last folder only; the parents would get the
    # umask's.
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    for part in reversed(missing):
        part.mkdir(mode=0o700, exist_ok=True)
    # Otherwise the write fails later with a message that names the temporary file.
    if not missing and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, expected a folder")


def _retry_transient(attempt: Callable[[], _T], transient: tuple[int, ...] = _TRANSIENT) -> _T:
    """What `attempt` returns; made again where a network file system fails for a moment. Raises its
    last OSError.
    """
    for pause_s in _PAUSES_S:
        try:
            return attempt()
        except OSError as error:
            if error.errno not in transient:
                raise
            time.sleep(pause_s)
    return attempt()


def _read(path: Path, limit_bytes: int) -> bytes | Refusal:
    with open(path, "rb") as file:
        # Of the open file, not of the path: another process may rename a larger file over it
        # meanwhile.
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            return Refusal(f"unreadable: {size} bytes, expected at most {limit_bytes}")
        # Bounded again: the file may grow after its size was read.
        return file.read(limit_bytes)


def _write(path: Path, data: bytes) -> None:
    _make_folder(path.parent)
    lock = FileLock(_lock_path(path), **_FLOCK_ONLY)
    try:
        lock.acquire(timeout=_WRITE_LOCK_S)
    except (
        OSError,
        NotImplementedError,
    ):
        # The file system has no locks, or the writer that holds it is frozen. The random name of
        # the temporary file and the rename keep the file whole without exclusion.
        return _replace(path, data)
    try:
        # No living writer owns one: a writer holds the lock that this process holds now.
        for leftover in path.parent.glob(f".{path.name}.*{_TEMPORARY}"):
            with contextlib.suppress(OSError):
                leftover.unlink()
        return _replace(path, data)
    finally:
        lock.release()


def _lock_path(path: Path) -> str:
    return str(path.absolute().with_suffix(".lock"))


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_TEMPORARY}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            # Synced before the rename: after a crash the name must not stand for a file whose bytes
            # never reached the disk.
            file.flush()
            os.fsync(file.fileno())
        try:
            os.replace(temporary, path)
        except OSError:
            # NFS sends a rename again when the answer was lost, and the second one fails.
            # The rename took place after all when the source is gone and the target has these
            # bytes.
            if temporary.exists() or read_file(path, len(data)) != data:
                raise
    finally:
        # Absent after a rename. A disk so full that it refuses even the unlink leaves the file to
        # the next writer of this name and to `purge`.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary files of `path` that no living writer holds."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError), open(leftover, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()
