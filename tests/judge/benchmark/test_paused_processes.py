"""While one side is timed the processes of the other stand still, and go on whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_cudal1.judge.benchmark.cross_process import TimedBatch
from torch_cudal1.judge.benchmark.paused_processes import PausableProcesses, UndisturbedTimer

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="this system does not list processes"
)
SPINS = "print(1, flush=True)\nwhile True: pass"
STARTS_ANOTHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPINS!r}])"


@pytest.fixture
def processes() -> Iterator[PausableProcesses]:
    """A supervisor that waits, and below it a process that spins."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_ANOTHER], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        below = PausableProcesses(process.pid)
        below.list_again()
        yield below
        os.kill(below.processes[0], 9)


def wait_for_state(pid: int, states: str) -> str:
    """The state of a process as the system names it, as soon as it is one of these."""
    deadline = time.monotonic() + 30.0
    while True:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in states or time.monotonic() > deadline:
            return state
        time.sleep(0.005)


def test_what_a_leader_started_stands_still_and_the_leader_does_not(
    processes: PausableProcesses,
) -> None:
    (spinning,) = processes.processes
    with processes.pause():
        assert wait_for_state(spinning, "T") == "T"
        assert wait_for_state(processes.leader, "RS") in "RS"
    assert wait_for_state(spinning, "RS") in "RS"


def test_a_failed_batch_leaves_nothing_stopped(processes: PausableProcesses) -> None:
    class Failing:
        max_calls = 7

        def time_batch(self, calls: int) -> TimedBatch:
            assert wait_for_state(processes.processes[0], "T") == "T"
            raise RuntimeError("a candidate's error")

    timer = UndisturbedTimer(Failing(), processes)
    assert timer.max_calls == 7
    with pytest.raises(RuntimeError, match="a candidate's error"):
        timer.time_batch(3)
    assert wait_for_state(processes.processes[0], "RS") in "RS"


def test_processes_that_have_ended_are_passed_over() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    processes = PausableProcesses(process.pid, [process.pid])
    with processes.pause():
        pass
    processes.list_again()
    assert processes.processes == []
