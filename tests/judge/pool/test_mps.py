"""The MPS server's daemon, by a program in its place; the real one is in test_measure_gpu.py."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest
import torch

from torch_cudal1.judge.pool import mps

InstallDaemon: TypeAlias = Callable[..., Path]  # puts the program on PATH, in a mode
CUDA = torch.device("cuda")
# Served by `-f` until it is told to quit; each command comes to a process of its own, as with the
# real one.
DAEMON = """#!/usr/bin/env python3
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if sys.argv[1:] == ["-f"]:
    (folder / "seen").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    if "BROKEN" in {mode!r}:
        (folder / "control.log").write_text("no such GPU")
        raise SystemExit(1)
    (folder / "control").touch()
    while not (folder / "quit").exists():
        time.sleep(0.01)
elif sys.stdin.read().startswith("quit"):
    (folder / "quit").touch()
elif "ASIDE" not in {mode!r}:
    print(4711)
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstallDaemon:
    """Gives this machine a GPU and such a program, in a mode."""

    def make(mode: str = "", probe: str = "") -> Path:
        program = tmp_path / "nvidia-cuda-mps-control"
        program.write_text(DAEMON.format(mode=mode))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34")
        )
        monkeypatch.setattr(
            mps.tempfile, "mkdtemp", lambda prefix: make_folder(tmp_path / "cudal1-mps-pipe")
        )
        monkeypatch.setattr(mps, "_PROBE", probe)
        return tmp_path / "cudal1-mps-pipe"

    return make


def make_folder(folder: Path) -> str:
    folder.mkdir()
    return str(folder)


def test_a_daemon_serves_one_gpu_from_a_folder_of_its_own_and_ends(machine: InstallDaemon) -> None:
    folder = machine()
    server = mps.start(CUDA)
    assert server is not None
    assert (folder / "seen").read_text() == "GPU-12-34"
    assert server.variables["CUDA_MPS_PIPE_DIRECTORY"] == str(folder)
    assert server.ask_daemon("get_server_list") == "4711"
    server.close()
    assert server._daemon.poll() == 0
    assert not folder.exists()
    server.close()


@pytest.mark.parametrize(
    ("mode", "probe"),
    [("BROKEN", ""), ("", "raise SystemExit(1)"), ("ASIDE", "")],
    ids=["ends", "refuses its client", "answers no command"],
)
def test_a_daemon_that_does_not_work_is_not_used_and_leaves_no_folder(
    machine: InstallDaemon, mode: str, probe: str
) -> None:
    folder = machine(mode, probe)
    assert mps.start(CUDA) is None
    assert not folder.exists()


def test_folders_of_killed_evaluators_are_removed_and_no_others(
    machine: InstallDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps.tempfile, "tempdir", str(tmp_path))
    for name in ("cudal1-mps-gone", "cudal1-mps-lives", "cudal1-mps-new", "mine"):
        (tmp_path / name).mkdir()
        if name != "cudal1-mps-new":
            (tmp_path / name / "owner").touch()
    pipe = machine()
    with (tmp_path / "cudal1-mps-lives" / "owner").open() as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        server = mps.start(CUDA)
        assert server is not None
        mps._sweep()
        assert pipe.exists(), "the folder in use"
        server.close()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        "cudal1-mps-lives",
        "cudal1-mps-new",
        "mine",
    }


KILLED = """
import sys, time
from types import SimpleNamespace
import torch
from torch_cudal1.judge.pool import mps
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="12-34")
mps._PROBE = ""
print(mps.start(torch.device("cuda"))._daemon.pid, flush=True)
time.sleep(600)
"""


def test_a_daemon_dies_with_an_evaluator_that_is_killed(
    machine: InstallDaemon, tmp_path: Path
) -> None:
    machine()
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE, text=True
    ) as evaluator:
        assert evaluator.stdout is not None
        daemon = Path(f"/proc/{int(evaluator.stdout.readline())}/stat")
        assert daemon.exists()
        evaluator.kill()
    deadline = time.monotonic() + 30
    while daemon.exists() and daemon.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


def test_without_such_a_program_there_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert mps.start(CUDA) is None


def test_a_daemon_that_does_not_quit_is_killed(
    machine: InstallDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    server = mps.start(CUDA)
    assert server is not None
    monkeypatch.setattr(mps, "_END_S", 0.2)
    monkeypatch.setattr(mps.Mps, "ask_daemon", lambda self, command: "")
    started_s = time.monotonic()
    server.close()
    assert server._daemon.poll() == -9
    assert time.monotonic() - started_s < 10
