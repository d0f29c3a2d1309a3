"""Landlock leaves the paths of its plan and no others."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from tests.judge.sandbox.confine.launching import linux, make_variables, run_confined
from torch_cudal1.judge.sandbox.confine import landlock
from torch_cudal1.judge.sandbox.confine.landlock import FilesystemAccess
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan


@linux
@pytest.mark.skipif(not landlock.find_version(), reason="this kernel has no Landlock")
def test_landlock_leaves_the_paths_of_its_plan_and_no_others(scratch: Path) -> None:
    (scratch / "in").mkdir()
    (scratch / "out").mkdir()
    (scratch / "out" / "file").write_text("secret")
    python = (
        sys.prefix,
        sys.base_prefix,
        "/usr",
        "/lib",
        "/lib64",
        "/bin",
        "/etc/ld.so.cache",
        *make_variables().values(),
    )
    plan = LaunchPlan(
        os.getpid(),
        str(scratch),
        FilesystemAccess(tuple(p for p in python if p.startswith("/")), (), (str(scratch / "in"),)),
    )
    code = """
import os
open("in/file", "w").write("x")
for what in (lambda: open("out/file"), lambda: open("out/new", "w"), lambda: os.rename("in/file", "out/moved"),
             lambda: os.symlink("/etc/passwd", "out/link"), lambda: os.link("out/file", "in/link"), lambda: os.unlink("out/file")):
    try: what()
    except OSError as error: print(error.errno)
    else: print("DONE")
"""
    status, output, _ = run_confined(scratch, code, plan)
    assert status == 0, output
    assert {int(line) for line in output.split()} <= {errno.EACCES, errno.EXDEV, errno.EPERM}
    assert (scratch / "out" / "file").read_text() == "secret"
    assert os.listdir(scratch / "out") == ["file"]
