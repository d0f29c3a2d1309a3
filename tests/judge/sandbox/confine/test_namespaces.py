"""A process in new namespaces sees only its own paths, processes and interfaces."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.judge.sandbox.confine.launching import linux, run_confined
from torch_cudal1.judge.sandbox.confine.landlock import FilesystemAccess
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan
from torch_cudal1.judge.sandbox.confine.namespaces import _drop_nested

ENTER = """
from torch_cudal1.judge.sandbox.confine.namespaces import enter_namespaces
enter_namespaces()
"""
LOOK = """
import os
print([path for path in ("/usr", "/etc", "/home", "/root", "/var") if os.path.exists(path)])
print(sorted(name for name in os.listdir("/proc") if name.isdigit()))
print([line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line])
try: open("/usr/written", "w")
except OSError as error: print(error.errno)
open("written", "w").write("x")
"""


def can_enter_namespaces() -> bool:
    """Whether this machine lets this user make namespaces."""
    entered = subprocess.run([sys.executable, "-c", ENTER], capture_output=True, check=False)
    return entered.returncode == 0


@linux
def test_a_process_in_namespaces_sees_its_own_world_and_writes_only_there(scratch: Path) -> None:
    if not can_enter_namespaces():
        pytest.skip("this machine makes no namespaces for this user")
    python = (sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/bin", "/proc")
    plan = LaunchPlan(
        os.getpid(),
        str(scratch),
        FilesystemAccess(read=python, write=(str(scratch),)),
        namespaces=True,
    )
    status, output, _ = run_confined(scratch, LOOK, plan)
    lines = output.decode().splitlines()
    assert status == 0, output
    own_folders = {f"/{path.split('/')[1]}" for path in (*python, str(scratch))}
    assert set(ast.literal_eval(lines[0])) <= own_folders
    assert lines[1] == "['1', '2']", "the first process of the namespace, and the one that looks"
    assert lines[2] == "['lo']"
    assert int(lines[3]) in (errno.EACCES, errno.EROFS)
    assert (scratch / "written").read_text() == "x"


def test_a_path_inside_another_one_is_not_mounted_twice() -> None:
    assert _drop_nested(["/usr/lib", "/usr", "/usrlocal", "/usr", "/opt/gcc/bin", "/opt/gcc"]) == [
        "/usr",
        "/opt/gcc",
        "/usrlocal",
    ]
