"""One judge at a time has a GPU, whatever its cache and user. A process that holds it for ever, or
tampers with the file, blocks no other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device import gpu_lock
from torch_cudal1.device.gpu_lock import lock_gpu

GPU = torch.device("cuda", 0)
NOBODY_UID = 65534
FORK = multiprocessing.get_context("fork")


class Holder:
    """Another process that holds the lock until `let_go` or its end, perhaps as another user."""

    def __init__(self, uid: int | None = None) -> None:
        self._ours, child_end = FORK.Pipe()
        self.process = FORK.Process(target=self._hold, args=(child_end, uid), daemon=True)
        self.process.start()
        assert self._ours.recv() == ""

    @staticmethod
    def _hold(pipe: Any, uid: int | None) -> None:
        if uid is not None:
            os.setuid(uid)
        with lock_gpu(GPU, "a test") as why:
            pipe.send(str(why or ""))
            pipe.recv()

    def let_go(self) -> None:
        self._ours.send("")

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="made-up")
    )
    monkeypatch.setattr(gpu_lock, "_FOLDER", tmp_path / "gpus")
    monkeypatch.setattr(gpu_lock, "_timed_out_locks", set())
    return tmp_path / "gpus"


@pytest.fixture
def holder(folder: Path) -> Iterator[Callable[..., Holder]]:
    """`holder()` starts one; all are ended with the test."""
    started: list[Holder] = []

    def start(uid: int | None = None) -> Holder:
        started.append(Holder(uid))
        return started[-1]

    yield start
    for lock_holder in started:
        lock_holder.process.kill()
        lock_holder.process.join()


def try_lock(wait_s: float = 0.05) -> str:
    with lock_gpu(GPU, "a test", wait_s=wait_s) as why:
        return str(why or "")


def test_the_cpu_needs_no_lock(folder: Path) -> None:
    with lock_gpu(torch.device("cpu"), "a test") as why:
        assert why == Refusal("not a CUDA device")
    assert not folder.exists()


def test_another_process_is_waited_for_and_the_wait_ends(holder: Callable[..., Holder]) -> None:
    process = holder()
    assert try_lock() == "another judge has timed on this GPU for 0.05 s"
    threading.Timer(0.2, process.let_go).start()
    assert try_lock(wait_s=600.0) == ""


@pytest.mark.parametrize("ended", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_of_a_dead_process_is_free(
    holder: Callable[..., Holder], ended: signal.Signals
) -> None:
    process = holder()
    process.signal(ended)
    process.process.join()
    assert try_lock() == ""


def test_a_process_that_holds_it_and_is_stopped_costs_less_each_time(
    holder: Callable[..., Holder],
) -> None:
    process = holder()
    process.signal(signal.SIGSTOP)
    assert try_lock(wait_s=1.0) == "another judge has timed on this GPU for 1 s"
    assert try_lock(wait_s=1.0) == "another judge has timed on this GPU for 0.1 s"
    process.signal(signal.SIGKILL)
    process.process.join()
    assert try_lock(wait_s=1.0) == ""
    assert not gpu_lock._timed_out_locks


def test_two_threads_exclude_each_other_too(folder: Path) -> None:
    with lock_gpu(GPU, "a test") as first:
        second: list[str] = []
        thread = threading.Thread(target=lambda: second.append(try_lock()))
        thread.start()
        thread.join()
        assert (first, "another judge" in second[0]) == (None, True)


def test_what_the_body_raises_lets_go_of_the_lock(folder: Path) -> None:
    with pytest.raises(OSError, match="of the body"), lock_gpu(GPU, "a test"):
        raise OSError("of the body")
    assert try_lock() == ""


def test_a_lock_file_that_was_cleaned_away_is_not_waited_for(
    holder: Callable[..., Holder], folder: Path
) -> None:
    holder()
    (folder / "made-up.lock").unlink()
    with lock_gpu(GPU, "a test", wait_s=600.0) as why:
        assert why is None
        assert "another judge" in try_lock()  # who comes now finds the new file


def test_another_user_s_lock_excludes_and_is_not_waited_for_for_ever(
    holder: Callable[..., Holder], folder: Path, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent != Path("/tmp"):
            parent.chmod(0o755)
    assert try_lock() == ""  # makes the folder
    (folder / "made-up.lock").unlink()
    holder(NOBODY_UID)
    assert (folder / "made-up.lock").stat().st_uid == NOBODY_UID
    assert "another judge" in try_lock()


def test_every_user_may_add_to_the_folder_and_no_other_may_replace_its_files(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        assert try_lock() == ""
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert stat.S_IMODE((folder / "made-up.lock").stat().st_mode) == 0o644


def test_a_link_in_the_lock_s_place_is_not_followed(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    assert try_lock() == ""
    (folder / "made-up.lock").unlink()
    (folder / "made-up.lock").symlink_to(precious)
    assert "no lock can be made" in try_lock()
    (folder / "made-up.lock").unlink()
    (folder / "made-up.lock").symlink_to(tmp_path / "not-there")
    assert "no lock can be made" in try_lock()
    assert precious.read_text() == "as it was"
    assert not (tmp_path / "not-there").exists()


def test_a_folder_that_is_a_link_is_not_entered(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert "no lock can be made" in try_lock()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_pipe_in_the_lock_s_place_blocks_no_process(folder: Path) -> None:
    assert try_lock() == ""
    (folder / "made-up.lock").unlink()
    os.mkfifo(folder / "made-up.lock")
    assert "is no regular file" in try_lock(wait_s=600.0)


def test_a_file_in_the_folder_s_place_is_an_answer(folder: Path) -> None:
    folder.touch()
    assert "no lock can be made" in try_lock()


def test_waiting_for_another_judge_takes_nothing_of_a_budget(holder: Callable[..., Holder]) -> None:
    holder()
    wall, working = time.monotonic(), gpu_lock.working_s()
    try_lock(wait_s=0.4)
    assert time.monotonic() - wall >= 0.4
    assert gpu_lock.working_s() - working <= time.monotonic() - wall - 0.35


def test_waiting_and_timing_are_counted_separately(holder: Callable[..., Holder]) -> None:
    process = holder()
    threading.Timer(0.3, process.let_go).start()
    (waited_s, held_s), worked = gpu_lock.lock_seconds(), gpu_lock.working_s()
    with lock_gpu(GPU, "a test", wait_s=600.0):
        time.sleep(0.1)
    now = gpu_lock.lock_seconds()
    assert now[0] - waited_s >= 0.2
    assert 0.1 <= now[1] - held_s < 0.3 + now[0] - waited_s
    assert gpu_lock.working_s() - worked < 0.3 + now[1] - held_s


def test_the_lock_s_uses_are_reported(holder: Callable[..., Holder]) -> None:
    before = gpu_lock.lock_uses().get("a benchmark", 0.0)
    for _ in range(2):
        with lock_gpu(GPU, "a benchmark"):
            time.sleep(0.05)
    assert 0.1 <= gpu_lock.lock_uses()["a benchmark"] - before < 5.0
