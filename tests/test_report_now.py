"""The plugin `tests.report_now`: a failure is reported at once, so that a run which is killed has
reported it too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import time
import pytest

@pytest.fixture
def broken():
    raise OSError("no such device")

@pytest.fixture
def left_open():
    yield
    raise RuntimeError("still open")

def test_right(): time.sleep(0.3)
def test_wrong():
    here = 41
    assert here == 42, "not the answer"
def test_with_a_broken_fixture(broken): pass
def test_that_leaves_something(left_open): pass
def test_that_hangs(): time.sleep(600)
"""
REPORTED = (
    ("FAILED", "test_wrong", "AssertionError: not the answer"),
    ("ERROR at setup of", "test_with_a_broken_fixture", "OSError: no such device"),
    ("ERROR at teardown of", "test_that_leaves_something", "RuntimeError: still open"),
)


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    (folder / "test_it.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.report_now",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
    ]
    with open(folder / "out", "w") as out:
        return subprocess.Popen(
            [*command, *options, str(folder)],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_a_run_that_is_killed_has_reported_its_failures(
    workers: tuple[str, ...], tmp_path: Path
) -> None:
    running = start(tmp_path, *workers)
    try:
        until = time.monotonic() + 120
        while (output := (tmp_path / "out").read_text()).count("slowest of") < len(
            REPORTED
        ) and time.monotonic() < until:
            assert running.poll() is None, output
            time.sleep(0.1)
    finally:
        os.killpg(running.pid, signal.SIGKILL)  # workers too
        running.wait()
    for kind, name, why in REPORTED:
        assert f"\n{kind} test_it.py::{name}\n" in output
        assert output.count(why) == 1
    assert "0.3" in next(
        line for line in output.splitlines() if line.endswith("s test_it.py::test_right")
    )
    assert "test_that_hangs" not in output


def test_the_slowest_are_listed_again_at_the_end(tmp_path: Path) -> None:
    running = start(tmp_path, "-k", "right or wrong")
    assert running.wait(120) == 1
    output = (tmp_path / "out").read_text()
    assert output.count("slowest of 2 so far") == 2, "at the failure and at the end"
    assert output.index("FAILED test_it.py::test_wrong\n") < output.index("= FAILURES =")


def test_a_file_that_cannot_be_imported_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("import nothing_of_that_name")
    running = start(tmp_path, "-k", "right")
    assert running.wait(120) == 2
    output = (tmp_path / "out").read_text()
    assert output.index("ERROR collecting test_other.py") < output.index("= ERRORS =")
