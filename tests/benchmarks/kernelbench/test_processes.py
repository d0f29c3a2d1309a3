"""A process is stopped, continued and ended with everything that it started."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kernelbench.processes import (
    continue_tree,
    kill_tree,
    list_process_tree,
    locate_process,
    stop_tree,
)

# a parent with a child in a session of its own, which writes a file again and again
_PARENT = """
import subprocess, sys
code = "import time\\nwhile True: open(%r, 'a').write('x'); time.sleep(0.01)" % sys.argv[1]
subprocess.Popen([sys.executable, "-c", code], start_new_session=True).wait()
"""
_TELLS = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1, all_threads=False)
def sleeps():
    time.sleep(600)
print("ready", flush=True)
sleeps()
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The parent, once its child has written."""
    beats = tmp_path / "beats"
    process = subprocess.Popen([sys.executable, "-c", _PARENT, str(beats)])
    wait_until(lambda: beats.exists() and beats.stat().st_size > 0)
    yield process
    kill_tree(process)


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_tree_has_the_children_of_other_sessions(parent: subprocess.Popen[bytes]) -> None:
    first, *descendants = list_process_tree(parent.pid)
    assert first == parent.pid
    assert len(descendants) == 1


def test_a_stopped_tree_stands_still_until_it_is_continued(
    parent: subprocess.Popen[bytes],
) -> None:
    stop_tree(parent.pid)
    wait_until(lambda: {state(pid) for pid in list_process_tree(parent.pid)} == {"T"})
    continue_tree(parent.pid)
    wait_until(lambda: "T" not in {state(pid) for pid in list_process_tree(parent.pid)})


def test_ending_a_process_ends_its_children_and_may_be_done_twice(
    parent: subprocess.Popen[bytes],
) -> None:
    _, child = list_process_tree(parent.pid)
    kill_tree(parent)
    assert parent.poll() == -9
    wait_until(lambda: not Path(f"/proc/{child}").exists() or state(child) == "Z")
    kill_tree(parent)


def test_a_process_says_in_which_function_it_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _TELLS], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: b"ready" in log.read_bytes())
        assert locate_process(process, log).endswith(" in sleeps")
    finally:
        kill_tree(process)
    assert locate_process(process, log) == ""
