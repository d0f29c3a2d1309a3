from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from torch_cudal1.judge.pool.gpu_rw_lock import GpuReadWriteLock

CPU = torch.device("cpu")
LONG_S = 60.0


def test_readers_share_and_a_waiting_writer_comes_before_later_readers(
    tmp_path: Path,
) -> None:
    locks = [GpuReadWriteLock(tmp_path, CPU) for _ in range(4)]
    order: list[str] = []
    timing_began, may_leave = threading.Event(), threading.Event()

    def time_alone() -> None:
        with locks[2].hold_exclusively():
            order.append("alone")
            timing_began.set()
            assert may_leave.wait(LONG_S)
            order.append("alone is done")

    def enter_late() -> None:
        with locks[3].hold_shared():
            order.append("late")

    with locks[0].hold_shared(), locks[1].hold_shared():
        timer = threading.Thread(target=time_alone)
        timer.start()
        assert not timing_began.wait(0.2)
    assert timing_began.wait(LONG_S)
    newcomer = threading.Thread(target=enter_late)
    newcomer.start()
    newcomer.join(0.2)
    assert order == ["alone"]
    may_leave.set()
    timer.join(LONG_S)
    newcomer.join(LONG_S)
    assert order == ["alone", "alone is done", "late"]
    for gpu_lock in locks:
        gpu_lock.close()


def test_a_reader_that_gives_way_lets_waiting_writers_in_and_comes_back_after_them(
    tmp_path: Path,
) -> None:
    holder, rival = GpuReadWriteLock(tmp_path, CPU), GpuReadWriteLock(tmp_path, CPU)
    order: list[str] = []
    with holder.hold_shared():
        holder.give_way()
        assert not holder.waited_s, "no writer waits"
        timer = threading.Thread(target=_enter, args=(rival.hold_exclusively(), "timer", order))
        timer.start()
        while not holder.waited_s:
            holder.give_way()
        order.append("back")
        timer.join(LONG_S)
        with rival.hold_shared():
            pass
    assert order == ["timer", "back"]
    holder.close()
    rival.close()


def test_a_resting_reader_blocks_no_writer_and_one_without_the_lock_stays_outside(
    tmp_path: Path,
) -> None:
    rester, rival = GpuReadWriteLock(tmp_path, CPU), GpuReadWriteLock(tmp_path, CPU)
    order: list[str] = []
    with rester.hold_shared():
        timer = threading.Thread(target=_enter, args=(rival.hold_exclusively(), "timer", order))
        timer.start()
        rester.pause_for(0.3)
        assert order == ["timer"]
        timer.join(LONG_S)
    rester.give_way()
    rester.pause_for(0.01)
    with rival.hold_exclusively():
        order.append("alone")
    assert order == ["timer", "alone"]
    rester.close()
    rival.close()


def test_the_lock_of_a_process_that_dies_is_free(tmp_path: Path) -> None:
    code = """
import os, sys, torch
from pathlib import Path
from torch_cudal1.judge.pool.gpu_rw_lock import GpuReadWriteLock
gate = GpuReadWriteLock(Path(sys.argv[1]), torch.device("cpu"))
gate.hold_exclusively().__enter__()
os._exit(9)
"""
    assert (
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=LONG_S).returncode == 9
    )
    gpu_lock = GpuReadWriteLock(tmp_path, CPU)
    with gpu_lock.hold_exclusively():
        pass
    gpu_lock.close()


def test_a_waiting_writer_goes_before_readers_that_wait_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = [GpuReadWriteLock(tmp_path, CPU) for _ in range(3)]
    order: list[str] = []
    timer = threading.Thread(target=_enter, args=(locks[1].hold_exclusively(), "timer", order))
    validator = threading.Thread(target=_enter, args=(locks[2].hold_shared(), "validator", order))
    through_the_door, flock = threading.Event(), fcntl.flock

    def note_door(fd: int, operation: int) -> None:
        flock(fd, operation)
        if threading.current_thread() is timer and operation == fcntl.LOCK_SH:
            through_the_door.set()

    monkeypatch.setattr(fcntl, "flock", note_door)
    with locks[0].hold_exclusively():
        validator.start()  # it waits at the door
        validator.join(0.1)
        timer.start()  # it comes later, and through the door
        assert through_the_door.wait(LONG_S)
        assert not order
    for thread in (timer, validator):
        thread.join(LONG_S)
    assert order == ["timer", "validator"]
    for gpu_lock in locks:
        gpu_lock.close()


def _enter(access: AbstractContextManager[None], name: str, order: list[str]) -> None:
    with access:
        order.append(name)
