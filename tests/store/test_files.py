"""Disks that are full, read-only, far away or wrong about the time cost a write and its reason;
what was there stays whole.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.store.conftest import CONTRACT, HERE, make_entry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.cache import files
from torch_cudal1.store.cache.cache_paths import entry_path
from torch_cudal1.store.cache.entry_file import encode_entry
from torch_cudal1.store.cache.files import (
    Stored,
    hold_lock,
    read_file,
    remove_leftovers,
    write_file,
)
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.cache.resolve import Hit

OLD, NEW = encode_entry(make_entry(package="old")), encode_entry(make_entry(package="new"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the sample entry lies; its older version is there already."""
    where = entry_path(tmp_path / "cache", make_entry().region_key, HERE, CONTRACT)
    assert write_file(where, OLD) == Stored(where)
    return where


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PAUSES_S", (0.0, 0.0))


def list_folder(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".tmp")]


def failing(
    number: int, *, times: int = 1_000_000, before: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A call that fails `times` times as the system would (after doing `before`); later ones do
    nothing.
    """
    remaining = [times]

    def fail(*args: Any, **kwargs: Any) -> None:
        if before is not None:
            before(*args, **kwargs)
        if remaining[0]:
            remaining[0] -= 1
            raise OSError(number, os.strerror(number))

    return fail


class Full(io.FileIO):
    """A file on a disk with room for `room` bytes more: a write beyond that is cut short, the next
    one fails.
    """

    room = 0

    def write(self, content: Any) -> int:
        written = bytes(content)[: Full.room]
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        Full.room -= len(written)
        return super().write(written) or 0


# A disk that is full at any byte
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 1, 8, 100, len(NEW) // 2, len(NEW) - 1])
def test_a_disk_that_fills_up_at_any_byte_keeps_the_old_entry(
    path: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Full.room = room
    with monkeypatch.context() as patch:
        patch.setattr(
            files, "open", lambda name, mode: io.BufferedWriter(Full(name, mode)), raising=False
        )
        answer = write_file(path, NEW)
    assert isinstance(answer, Refusal)
    assert str(path) in answer.reason
    assert os.strerror(errno.ENOSPC) in answer.reason
    assert path.read_bytes() == OLD
    assert list_folder(path.parent) == []
    assert write_file(path, NEW) == Stored(path)


def test_a_disk_so_full_that_nothing_can_be_deleted_is_cleared_by_the_next_writer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.ENOSPC))
        patch.setattr(Path, "unlink", failing(errno.ENOSPC))
        assert isinstance(write_file(path, NEW), Refusal)
    assert len(list_folder(path.parent)) == 1
    assert path.read_bytes() == OLD
    assert write_file(path, NEW) == Stored(path)
    assert list_folder(path.parent) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write read-only folders")
def test_a_read_only_folder_is_a_reason(path: Path) -> None:
    path.parent.chmod(0o500)
    answer = write_file(path, NEW)
    path.parent.chmod(0o700)
    assert isinstance(answer, Refusal)
    assert path.read_bytes() == OLD


# Network file systems
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [errno.EXDEV, errno.EACCES, errno.EIO, errno.EBUSY, errno.ESTALE],
    ids=errno.errorcode.get,
)
def test_a_rename_that_keeps_failing_names_file_and_reason(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing(number))
        answer = write_file(path, NEW)
    assert isinstance(answer, Refusal)
    assert str(path) in answer.reason
    assert os.strerror(number) in answer.reason
    assert path.read_bytes() == OLD
    assert list_folder(path.parent) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_stale_handle_is_tried_again(
    path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, remaining = getattr(os, call), [2]

    def stale_twice(*args: Any) -> None:
        remaining[0] -= 1
        if remaining[0] >= 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        original(*args)

    monkeypatch.setattr(os, call, stale_twice)
    assert write_file(path, NEW) == Stored(path)
    assert path.read_bytes() == NEW
    assert list_folder(path.parent) == []


def test_a_rename_that_took_place_though_it_failed_is_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", failing(errno.ENOENT, before=os.replace))
    assert write_file(path, NEW) == Stored(path)
    assert path.read_bytes() == NEW


def test_a_folder_removed_under_the_writer_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, removed = os.replace, []

    def remove_once(*args: Any) -> None:
        if not removed:
            for name in os.listdir(path.parent):
                os.unlink(path.parent / name)
            path.parent.rmdir()
            removed.append(True)
        original(*args)

    monkeypatch.setattr(os, "replace", remove_once)
    assert write_file(path, NEW) == Stored(path)
    assert path.read_bytes() == NEW


def test_reading_through_a_stale_handle_is_tried_again_and_then_a_miss(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = failing(errno.ESTALE, times=2)

    def open_once(name: Path, mode: str) -> Any:
        stale()
        return io.open(name, mode)  # noqa: UP020  the built-in is what is replaced

    monkeypatch.setattr(files, "open", open_once, raising=False)
    assert read_file(path, 1 << 30) == OLD
    monkeypatch.setattr(files, "open", failing(errno.ESTALE), raising=False)
    miss = read_file(path, 1 << 30)
    assert isinstance(miss, Refusal)
    assert os.strerror(errno.ESTALE) in miss.reason


@pytest.mark.parametrize(
    "number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get
)
def test_without_locks_entries_are_still_stored_and_searches_go_on(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.with_suffix(
        ".search.lock"
    ).touch()  # both lock files are there, from a file system that had locks
    monkeypatch.setattr(fcntl, "flock", failing(number))
    monkeypatch.setattr(
        files, "_WRITE_LOCK_S", 3600.0
    )  # nothing waits for a lock that cannot be had
    assert write_file(path, NEW) == Stored(path)
    assert path.read_bytes() == NEW
    with hold_lock(path.with_suffix(".search.lock"), 3600.0) as state:
        assert not state.held
        assert "flock" in state.reason or os.strerror(number) in state.reason
    assert remove_leftovers(path.parents[4]) == ()


def test_a_writer_that_never_ends_is_not_waited_for_forever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_WRITE_LOCK_S", 0.05)
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code, files._lock_path(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as frozen:
        assert frozen.stdout is not None
        assert frozen.stdout.readline() == b"held\n"
        leftover = path.with_name(f".{path.name}.{frozen.pid}.abcd.tmp")
        leftover.write_bytes(b"half")
        assert write_file(path, NEW) == Stored(path)
        assert leftover.exists()  # it may still be writing that
        assert remove_leftovers(path.parents[4]) == ()
        frozen.kill()
    assert path.read_bytes() == NEW
    assert write_file(path, OLD) == Stored(path)  # the dead hold nothing
    assert not leftover.exists()


# Clocks and what the dead left
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew_s", [-10 * 365 * 86400, 10 * 365 * 86400], ids=["past", "future"])
def test_times_of_files_mean_nothing(
    path: Path, skew_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, leftover = Path(files._lock_path(path)), path.with_name(f".{path.name}.1.aa.tmp")
    leftover.write_bytes(b"half")
    search = path.with_suffix(".search.lock")
    search.touch()
    when = time.time() + skew_s
    for each in (path, lock, leftover, search, path.parent):
        os.utime(each, (when, when))
    monkeypatch.setattr(time, "time", lambda: when)
    cache = LocalCache(path.parents[4])
    with cache.lock(make_entry().region_key, HERE, CONTRACT, timeout_s=1.0) as state:
        assert state.held
        hit = cache.get(make_entry().region_key, HERE, CONTRACT)
        assert isinstance(hit, Hit)
        assert (hit.entry.package, hit.stale) == ("old", None)
        assert write_file(path, NEW) == Stored(path)
    assert list_folder(path.parent) == []


def test_the_next_writer_removes_what_killed_ones_left_of_this_name_only(path: Path) -> None:
    own_leftover, other = (
        path.with_name(f".{name}.99999.abcd.tmp")
        for name in (path.name, f"{'cd' * 32}.safetensors")
    )
    for each in (own_leftover, other):
        each.write_bytes(b"half")
    assert write_file(path, NEW) == Stored(path)
    assert list_folder(path.parent) == [other.name]


def test_lock_files_of_dead_processes_with_anything_in_them_hold_nothing(path: Path) -> None:
    for lock in (Path(files._lock_path(path)), path.with_suffix(".search.lock")):
        lock.write_text("1\nsome-host\n")  # what locks by existence write; nobody flocks it
    assert write_file(path, NEW) == Stored(path)
    with hold_lock(path.with_suffix(".search.lock"), 0.5) as state:
        assert state.held
