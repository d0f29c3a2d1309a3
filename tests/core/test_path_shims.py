"""A program that this machine lacks is on PATH for a block only, after every program of its own."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from torch_cudal1.core.path_shims import file_program_shim, script_on_path

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def without_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH whose only folder has no program `file`."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_a_script_runs_inside_of_its_block_only(without_file: Path) -> None:
    with script_on_path("answer", "#!/bin/sh\necho 42\n"):
        shown = subprocess.run(["answer"], capture_output=True, text=True, check=True)
        assert shown.stdout == "42\n"
    assert shutil.which("answer") is None
    assert os.environ["PATH"] == str(without_file)


def test_a_program_of_the_machine_comes_first(without_file: Path) -> None:
    program = without_file / "answer"
    program.write_text("#!/bin/sh\necho machine\n")
    program.chmod(0o700)
    with script_on_path("answer", "#!/bin/sh\necho shim\n"):
        assert shutil.which("answer") == str(program)


def test_path_is_as_before_after_a_failure_and_inside_another_block(without_file: Path) -> None:
    with script_on_path("outer", "#!/bin/sh\n"):
        inside = os.environ["PATH"]
        with pytest.raises(ZeroDivisionError), script_on_path("inner", "#!/bin/sh\n"):
            raise ZeroDivisionError
        assert os.environ["PATH"] == inside
        assert shutil.which("outer")
    assert os.environ["PATH"] == str(without_file)


def test_python_is_described_as_by_the_program_file(without_file: Path) -> None:
    before = platform.architecture()
    with file_program_shim(CUDA):
        assert platform.architecture() == (before[0], "ELF")
    assert shutil.which("file") is None


def test_nothing_is_put_on_path_for_a_cpu_or_where_the_program_is(without_file: Path) -> None:
    with file_program_shim(CPU):
        assert shutil.which("file") is None
    program = without_file / "file"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    with file_program_shim(CUDA):
        assert os.environ["PATH"] == str(without_file)
