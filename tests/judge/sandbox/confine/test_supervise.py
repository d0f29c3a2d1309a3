"""The supervisor ends as its worker did, keeps the end of its output, and leaves no process behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.judge.sandbox.confine.launching import HOLD, is_free, linux, make_variables, run_confined

ENDS = {
    "import os; os._exit(0)": 0,
    "import os; os._exit(3)": 3,
    "import os; os.kill(os.getpid(), 11)": -11,
    "import os; os.kill(os.getpid(), 9)": -9,
    "import ctypes; ctypes.string_at(0)": -11,
    "raise SystemExit('last words')": 1,
}


@linux
@pytest.mark.parametrize("code", ENDS)
def test_the_supervisor_ends_as_its_worker_did(scratch: Path, code: str) -> None:
    status, output, _ = run_confined(scratch, code)
    assert status == ENDS[code]
    assert (b"last words" in output) == ("last words" in code)


@linux
def test_a_flood_of_output_keeps_its_end_only(scratch: Path) -> None:
    flood = "import os\nfor _ in range(2000): os.write(1, b'x' * 100_000)\nos.write(1, b'the end')"
    status, output, _ = run_confined(scratch, flood)
    assert status == 0
    assert len(output) <= 64 << 10
    assert output.endswith(b"the end")


ESCAPES = {
    "child": "os.fork() or hold()",
    "session": "os.fork() or (os.setsid(), hold())",
    "orphan": "os.fork() or (os.setsid(), os.fork() and os._exit(0), hold())",
    "deaf": "os.fork() or (signal.signal(signal.SIGTERM, signal.SIG_IGN), signal.signal(signal.SIGHUP, signal.SIG_IGN), hold())",
}


@linux
@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize("stopped", [False, True], ids=["at its own end", "when told to stop"])
def test_no_process_outlives_its_supervisor(scratch: Path, escape: str, stopped: bool) -> None:
    after = (
        "time.sleep(600)" if stopped else "\nwhile not os.path.exists('ready'): time.sleep(0.01)"
    )
    run_confined(
        scratch, f"{HOLD}\n{ESCAPES[escape]}\n{after}", stop_after_s=2.0 if stopped else 0.0
    )
    assert (scratch / "ready").exists()
    assert is_free(scratch / "lock")


@linux
def test_processes_that_own_code_started_may_end_by_themselves(scratch: Path) -> None:
    """As the pool of a compiler does, which removes its semaphores when its pipe is closed."""
    tidy = "os.close(w); os.read(r, 1); open('tidy', 'w').close(); os._exit(0)"
    pool = f"import os\nr, w = os.pipe()\nif os.fork() == 0: {tidy}\nos.close(r)"
    run_confined(scratch, f"{pool}\nimport time; time.sleep(600)", stop_after_s=2.0)
    assert (scratch / "tidy").exists()


@linux
def test_the_worker_dies_with_the_judge(scratch: Path) -> None:
    code = f"""
import os, sys, time
from pathlib import Path
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan
import subprocess
plan = LaunchPlan(os.getpid(), {str(scratch)!r}).to_json()
command = [sys.executable, "-S", "-c", {HOLD + "hold()"!r}]
subprocess.Popen([sys.executable, "-S", "-P", "-m", "torch_cudal1.judge.sandbox.confine", plan, *command], cwd={str(scratch)!r})
while not os.path.exists({str(scratch / "ready")!r}): time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    subprocess.run(
        [sys.executable, "-S", "-c", code], env=make_variables(), timeout=60, check=False
    )
    deadline = time.monotonic() + 20
    while not is_free(scratch / "lock") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_free(scratch / "lock")
