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


def test_many_may_share_and_one_may_be_alone_and_comes_before_those_after_it(
    tmp_path: Path,
) -> None:
    gates = [GpuReadWriteLock(tmp_path, CPU) for _ in range(4)]
    order: list[str] = []
    timing, leave = threading.Event(), threading.Event()

    def alone() -> None:
        with gates[2].alone():
            order.append("alone")
            timing.set()
            assert leave.wait(LONG_S)
            order.append("alone is done")

    def late() -> None:
        with gates[3].shared():
            order.append("late")

    with gates[0].shared(), gates[1].shared():
        timer = threading.Thread(target=alone)
        timer.start()
        assert not timing.wait(0.2)
    assert timing.wait(LONG_S)
    newcomer = threading.Thread(target=late)
    newcomer.start()
    newcomer.join(0.2)
    assert order == ["alone"]
    leave.set()
    timer.join(LONG_S)
    newcomer.join(LONG_S)
    assert order == ["alone", "alone is done", "late"]
    for gate in gates:
        gate.close()


def test_who_is_inside_lets_those_go_first_who_wait_to_time_and_comes_back_after_them(
    tmp_path: Path,
) -> None:
    inside, other = GpuReadWriteLock(tmp_path, CPU), GpuReadWriteLock(tmp_path, CPU)
    order: list[str] = []
    with inside.shared():
        inside.give_way()
        assert not inside.waited_s, "nobody waits"
        timer = threading.Thread(target=_enter, args=(other.alone(), "timer", order))
        timer.start()
        while not inside.waited_s:
            inside.give_way()
        order.append("back")
        timer.join(LONG_S)
        with other.shared():
            pass
    assert order == ["timer", "back"]
    inside.close()
    other.close()


def test_who_rests_is_in_nobodys_way_and_who_was_not_inside_stays_outside(tmp_path: Path) -> None:
    resting, other = GpuReadWriteLock(tmp_path, CPU), GpuReadWriteLock(tmp_path, CPU)
    order: list[str] = []
    with resting.shared():
        timer = threading.Thread(target=_enter, args=(other.alone(), "timer", order))
        timer.start()
        resting.rest(0.3)
        assert order == ["timer"]
        timer.join(LONG_S)
    resting.give_way()
    resting.rest(0.01)
    with other.alone():
        order.append("alone")
    assert order == ["timer", "alone"]
    resting.close()
    other.close()


def test_the_lock_of_a_process_that_dies_is_free(tmp_path: Path) -> None:
    code = """
import os, sys, torch
from pathlib import Path
from torch_cudal1.judge.pool.gpu_rw_lock import GpuReadWriteLock
gate = GpuReadWriteLock(Path(sys.argv[1]), torch.device("cpu"))
gate.alone().__enter__()
os._exit(9)
"""
    assert (
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=LONG_S).returncode == 9
    )
    gate = GpuReadWriteLock(tmp_path, CPU)
    with gate.alone():
        pass
    gate.close()


def test_who_waits_to_time_goes_before_those_who_come_to_validate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [GpuReadWriteLock(tmp_path, CPU) for _ in range(3)]
    order: list[str] = []
    timer = threading.Thread(target=_enter, args=(gates[1].alone(), "timer", order))
    validator = threading.Thread(target=_enter, args=(gates[2].shared(), "validator", order))
    through_the_door, lock = threading.Event(), fcntl.flock

    def watched(fd: int, how: int) -> None:
        lock(fd, how)
        if threading.current_thread() is timer and how == fcntl.LOCK_SH:
            through_the_door.set()

    monkeypatch.setattr(fcntl, "flock", watched)
    with gates[0].alone():
        validator.start()  # it waits at the door
        validator.join(0.1)
        timer.start()  # it comes later, and through the door
        assert through_the_door.wait(LONG_S)
        assert not order
    for thread in (timer, validator):
        thread.join(LONG_S)
    assert order == ["timer", "validator"]
    for gate in gates:
        gate.close()


def _enter(room: AbstractContextManager[None], name: str, order: list[str]) -> None:
    with room:
        order.append(name)
