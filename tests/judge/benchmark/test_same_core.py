"""Processes that are raced share a core, another one each time, and have all cores again
afterwards.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from torch_cudal1.judge.benchmark import same_core as module
from torch_cudal1.judge.benchmark.same_core import SameCore, same_core

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system has no cores to choose"
)
ALL = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
STARTS_ANOTHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)'])"


@pytest.fixture
def supervised() -> Iterator[tuple[int, int]]:
    """A process, and the one that it started, as a child's supervisor and the child."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_ANOTHER], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (below,) = module._find_descendants(process.pid)
        yield process.pid, below
        os.kill(below, 9)


def test_a_process_and_what_it_started_share_a_core_and_then_have_all(
    supervised: tuple[int, int],
) -> None:
    with same_core([supervised[0]]) as held:
        assert held is not None
        assert held.move()
        found = [os.sched_getaffinity(pid) for pid in supervised]
        assert found[0] == found[1]
        assert len(found[0]) == 1
        assert held.shared
        assert os.sched_getaffinity(0) == ALL  # this process waits elsewhere
    assert [os.sched_getaffinity(pid) for pid in supervised] == [ALL, ALL]


def test_the_core_is_one_of_the_idler_half(
    supervised: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter([dict.fromkeys(range(4), 1_000), {0: 1_900, 1: 1_001, 2: 1_500, 3: 1_000}])
    monkeypatch.setattr(module, "_busy_ticks", lambda: next(ticks))
    put: list[set[int]] = []
    monkeypatch.setattr(module, "_pin_thread", lambda thread, cores: put.append(cores))
    held = SameCore([supervised[0]])
    held._allowed = set(range(4))
    assert held.move()
    assert put[0] <= {1, 3}
    assert all(cores == put[0] for cores in put)


def test_a_process_that_is_gone_leaves_cores_as_they_are() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with same_core([process.pid]) as held:
        assert held is not None
        assert not held.move()
        assert not held.shared


def test_where_one_of_two_is_gone_the_other_keeps_all_cores(supervised: tuple[int, int]) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for leaders in ([supervised[0], gone.pid], [gone.pid, supervised[0]]):
        with same_core(leaders) as held:
            assert held is not None
            assert not held.move()
            assert [os.sched_getaffinity(pid) for pid in supervised] == [ALL, ALL]


def test_one_that_ends_during_the_race_keeps_nobody_on_its_core(
    supervised: tuple[int, int],
) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        with same_core([other.pid, supervised[0]]) as held:
            assert held is not None
            assert held.move()
            other.kill()
            other.wait()
        assert [os.sched_getaffinity(pid) for pid in supervised] == [ALL, ALL]


def test_a_process_of_somebody_else_leaves_cores_as_they_are(
    supervised: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: int, cores: set[int]) -> None:
        raise PermissionError(1, "not yours")

    monkeypatch.setattr(module, "_pin_thread", refused)
    with same_core([supervised[0]]) as held:
        assert held is not None
        assert not held.move()


def test_a_core_that_works_is_told_from_one_that_does_not() -> None:
    core = min(ALL)
    before = module._busy_ticks()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        os.sched_setaffinity(process.pid, {core})
        time.sleep(0.5)
        process.kill()
    after = module._busy_ticks()
    assert after[core] - before[core] >= 20  # hundredths of a second
