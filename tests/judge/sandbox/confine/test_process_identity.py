"""A confined process has its own limits, user and capabilities."""

from __future__ import annotations

import os
from pathlib import Path

from tests.judge.sandbox.confine.launching import HOLD, linux, run_confined
from torch_cudal1.judge.sandbox.confine import process_identity
from torch_cudal1.judge.sandbox.confine.landlock import FilesystemAccess
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan


@linux
def test_a_fork_bomb_is_defused(scratch: Path) -> None:
    bomb = (
        HOLD
        + "\nwhile True:\n  try: os.fork()\n  except OSError: open('full', 'w').close(); time.sleep(0.05)"
    )
    plan = LaunchPlan(os.getpid(), str(scratch), uid=None, processes=40)
    before = process_identity.count_threads(os.getuid())
    if os.getuid() == 0:  # the system counts no processes of root's
        scratch.chmod(0o777)
        plan = LaunchPlan(
            os.getpid(),
            str(scratch),
            FilesystemAccess(read=("/",), write=(str(scratch),)),
            uid=61183,
            keep=(1,),
            processes=40,
        )
    _, _, seconds = run_confined(scratch, bomb, plan, stop_after_s=2.0)
    assert (scratch / "full").exists(), "the limit was never met"
    assert seconds < 30
    assert process_identity.count_threads(61183 if os.getuid() == 0 else os.getuid()) <= (
        0 if os.getuid() == 0 else before + 5
    )
