"""A process starts as its plan says, or not at all."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.judge.sandbox.confine.launching import linux, run_confined
from torch_cudal1.judge.sandbox import start
from torch_cudal1.judge.sandbox.confine import landlock, seccomp
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan
from torch_cudal1.judge.sandbox.filesystem_policy import make_environment
from torch_cudal1.judge.sandbox.limits import Limits
from torch_cudal1.judge.sandbox.scratch import make_scratch


@linux
def test_a_process_that_cannot_be_confined_does_not_start(scratch: Path) -> None:
    plan = LaunchPlan(os.getpid(), str(scratch), rlimits={"NOFILE": 2})
    status, output, _ = run_confined(scratch, "open('started', 'w')", plan)
    assert status != 0
    assert not (scratch / "started").exists()
    assert output


needs_landlock = pytest.mark.skipif(
    not landlock.find_version() or not seccomp.is_supported(),
    reason="no Landlock or no filter here: level 1 only",
)

STARTS_LIKE_CUDA = """
import os, sys
if (worker := os.fork()) == 0:
    with open("/proc/self/comm", "w") as name:
        name.write("cuda")
    os._exit(0)
sys.exit(bool(os.waitpid(worker, 0)[1]))
"""


@needs_landlock
@pytest.mark.parametrize("trust", ["own", "foreign"])
def test_processes_that_own_code_starts_may_start_the_gpus_driver_too(
    trust: str, tmp_path: Path
) -> None:
    """CUDA writes into the /proc folder of its process. Inductor's compile workers are processes of
    a child, and ask CUDA.
    """
    scratch = make_scratch()
    try:
        limits = Limits(torch.device("cuda"), 30.0, trust=trust)  # type: ignore[arg-type]
        make_variables = make_environment(scratch, own=trust == "own", visible_gpu=True)
        plan = start.plan_launch(limits, 2, scratch, make_variables)
        with (tmp_path / "log").open("wb") as log:
            process = start.launch_process(
                plan,
                [sys.executable, "-S", "-P", "-c", STARTS_LIKE_CUDA],
                make_variables,
                fds=(),
                log=log,
            )
            status = process.wait(60)
            start.end_process(process)
        assert (status == 0) == (trust == "own"), (tmp_path / "log").read_text()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
