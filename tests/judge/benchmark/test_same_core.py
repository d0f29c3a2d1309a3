"""Processes that are benchmarked share a core, another one each time, and have all cores again
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
from torch_cudal1.judge.benchmark.same_core import SameCore, share_core

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system has no cores to choose"
)
ALL = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
STARTS_ANOTHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)'])"


@pytest.fixture
def process_tree() -> Iterator[tuple[int, int]]:
    """A process, and the one that it started, as a child's supervisor and the child."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_ANOTHER], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (descendant,) = module.find_descendants(process.pid)
        yield process.pid, descendant
        os.kill(descendant, 9)


def test_a_process_and_what_it_started_share_a_core_and_then_have_all(
    process_tree: tuple[int, int],
) -> None:
    with share_core([process_tree[0]]) as pinned:
        assert pinned is not None
        assert pinned.move()
        affinities = [os.sched_getaffinity(pid) for pid in process_tree]
        assert affinities[0] == affinities[1]
        assert len(affinities[0]) == 1
        assert pinned.shared
        assert os.sched_getaffinity(0) == ALL  # this process waits elsewhere
    assert [os.sched_getaffinity(pid) for pid in process_tree] == [ALL, ALL]


def test_the_core_is_one_of_the_idler_half(
    process_tree: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter([dict.fromkeys(range(4), 1_000), {0: 1_900, 1: 1_001, 2: 1_500, 3: 1_000}])
    monkeypatch.setattr(module, "_read_busy_ticks", lambda: next(ticks))
    pinned_cores: list[set[int]] = []
    monkeypatch.setattr(module, "_pin_thread", lambda thread, cores: pinned_cores.append(cores))
    pinned = SameCore([process_tree[0]])
    pinned._allowed = set(range(4))
    assert pinned.move()
    assert pinned_cores[0] <= {1, 3}
    assert all(cores == pinned_cores[0] for cores in pinned_cores)


def test_a_process_that_has_ended_changes_no_cores() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with share_core([process.pid]) as pinned:
        assert pinned is not None
        assert not pinned.move()
        assert not pinned.shared


def test_where_one_of_two_processes_has_ended_the_other_keeps_all_cores(
    process_tree: tuple[int, int],
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for leaders in ([process_tree[0], ended.pid], [ended.pid, process_tree[0]]):
        with share_core(leaders) as pinned:
            assert pinned is not None
            assert not pinned.move()
            assert [os.sched_getaffinity(pid) for pid in process_tree] == [ALL, ALL]


def test_a_process_that_ends_during_the_benchmark_leaves_the_other_all_cores(
    process_tree: tuple[int, int],
) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        with share_core([other.pid, process_tree[0]]) as pinned:
            assert pinned is not None
            assert pinned.move()
            other.kill()
            other.wait()
        assert [os.sched_getaffinity(pid) for pid in process_tree] == [ALL, ALL]


def test_a_process_of_another_user_keeps_its_cores(
    process_tree: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_pinning(thread: int, cores: set[int]) -> None:
        raise PermissionError(1, "not yours")

    monkeypatch.setattr(module, "_pin_thread", refuse_pinning)
    with share_core([process_tree[0]]) as pinned:
        assert pinned is not None
        assert not pinned.move()


def test_a_busy_core_is_distinguished_from_an_idle_one() -> None:
    core = min(ALL)
    before = module._read_busy_ticks()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        os.sched_setaffinity(process.pid, {core})
        time.sleep(0.5)
        process.kill()
    after = module._read_busy_ticks()
    assert after[core] - before[core] >= 20  # hundredths of a second
