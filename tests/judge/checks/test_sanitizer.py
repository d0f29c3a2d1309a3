"""What compute-sanitizer reports is read rightly, and a child can be started by a tool. On a GPU:
`test_gpu_detectors`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.judge.programs import candidate, linear_relu, subject
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.checks.sanitizer import SANITIZER, _build_command, read_report
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

CPU = torch.device("cpu")
REGION = linear_relu()

REPORTS = {  # text of a report, how the call ended, whether the check passes, a word of its detail
    "clean": (
        "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",
        "",
        True,
        "no errors",
    ),
    "a stray read": (
        "========= Invalid __global__ read of size 4 bytes\n=========     at product+0x90\n========= ERROR SUMMARY: 12 errors\n",
        "",
        False,
        "Invalid __global__ read",
    ),
    "a hazard": (
        "========= Error: Race reported between Write access\n========= RACECHECK SUMMARY: 1 hazard displayed\n",
        "",
        False,
        "Race",
    ),
    "counted and not shown": ("========= ERROR SUMMARY: 3 errors\n", "", False, "3 errors"),
    "died on the way": (
        "========= COMPUTE-SANITIZER\n",
        "run: the process died",
        False,
        "the call failed under the tool",
    ),
    "the tool did not run": ("", "", True, "left no summary"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_of_the_sanitizer_is_read(tmp_path: Path, name: str) -> None:
    text, failed, passes, word = REPORTS[name]
    (tmp_path / "log").write_text(text)
    check = read_report(tmp_path / "log", "memcheck", failed)
    assert check.passed == passes
    assert word in check.detail


def test_every_program_of_the_command_is_a_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    programs = [
        word for word in _build_command("memcheck") if word.endswith(("/env", "/compute-sanitizer"))
    ]
    assert len(programs) == 2
    assert all(os.path.isabs(program) and os.access(program, os.X_OK) for program in programs)


def test_a_child_can_be_started_by_a_tool_and_ends_by_itself() -> None:
    with Child(
        make_limits(Settings(), CPU), Contract(), tool=(str(shutil.which("env")), "MKL_VERBOSE=0")
    ) as child:
        assert child.surroundings["environment"]["MKL_VERBOSE"] == "0"
        (check,) = SANITIZER.run(
            Trial(subject(REGION), candidate(REGION.program), Contract(), CPU, child)
        )
        assert check.passed
        assert "not applicable: no GPU" in check.detail
        assert child.finish(60.0)
