"""Files that are there whole or not at all: atomic writes, bounded reads, locks, and the removal of what a killed writer left.

Concurrency: a writer holds the file's lock (flock, so a dead process holds nothing), writes a temporary file beside it, syncs it
and renames it over the name. Readers take no lock: they see the old file, the new one, or none. Whoever gets a file's lock may
therefore delete the temporary files of that name. What the files mean is not known here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from torch_cudal1.records import Miss

__all__ = ["LockState", "NotStored", "Stored", "files_under", "hold", "read_file", "remove_leftovers", "write_file"]

_WRITE_LOCK_S = 30.0  # a writer holds it for milliseconds; longer means a frozen process or a sick file system
_TEMPORARY = ".tmp"


@dataclass(frozen=True)
class Stored:
    """The file is on the disk, whole and synced."""

    path: Path


@dataclass(frozen=True)
class NotStored:
    """Nothing was changed on the disk, and why; the caller goes on without."""

    reason: str


@dataclass(frozen=True)
class LockState:
    """Whether the lock is held; if not, why (read-only folder, time-out), and the caller works without exclusion."""

    held: bool
    reason: str = ""


def write_file(path: Path, data: bytes) -> Stored | NotStored:
    """Replace `path` by `data` in one step. Any refusal of the file system (read-only, full, quota, ...) is a NotStored."""
    try:
        _make_folder(path.parent)
        with FileLock(_lock_path(path), timeout=_WRITE_LOCK_S):
            _replace(path, data)
    except (OSError, NotImplementedError) as error:  # NotImplementedError: filelock on a file system without flock
        return NotStored(f"{type(error).__name__}: {error}")
    return Stored(path)


def read_file(path: Path, limit_bytes: int) -> bytes | Miss:
    """The bytes of `path`: Miss("absent") when there is no such file, Miss("unreadable: ...") when it is too large or refused."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit_bytes:
                return Miss(f"unreadable: {size} bytes, expected at most {limit_bytes}")
            return file.read(limit_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return Miss("absent")
    except OSError as error:
        return Miss(f"unreadable: {type(error).__name__}: {error}")


@contextlib.contextmanager
def hold(path: Path, timeout_s: float) -> Iterator[LockState]:
    """Hold the lock file `path` among threads and processes; the same thread may hold it twice."""
    lock = FileLock(path.absolute(), is_singleton=True)
    state = LockState(True)
    try:
        _make_folder(path.parent)
        lock.acquire(timeout=timeout_s)
    except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError too
        state = LockState(False, f"{type(error).__name__}: {error}")
    try:
        yield state
    finally:
        if state.held:
            lock.release()


def files_under(root: Path, suffix: str) -> Iterator[Path]:
    """Files below `root` whose name ends with `suffix`, in path order; folders that vanish or refuse are skipped."""
    for folder, subfolders, names in os.walk(root):
        subfolders.sort()
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(suffix))


def remove_leftovers(root: Path) -> tuple[Path, ...]:
    """Delete the temporary files below `root` that no living writer owns; returns what was deleted."""
    removed: list[Path] = []
    for temporary in list(files_under(root, _TEMPORARY)):
        if not temporary.name.startswith("."):
            continue  # not ours
        target = temporary.with_name(temporary.name.removeprefix(".").rsplit(".", 3)[0])
        with contextlib.suppress(OSError, NotImplementedError), FileLock(_lock_path(target), timeout=0):
            temporary.unlink()
            removed.append(temporary)
    return tuple(removed)


def _make_folder(folder: Path) -> None:
    """Folders of a new cache are the owner's alone: an entry holds machine code that this user will run."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    for part in reversed(missing):
        part.mkdir(mode=0o700, exist_ok=True)
    if not missing and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, expected a folder")


def _lock_path(path: Path) -> str:
    return str(path.absolute().with_suffix(".lock"))


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{_TEMPORARY}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # gone after a rename; a disk that refuses even this is purge's work
            temporary.unlink(missing_ok=True)
