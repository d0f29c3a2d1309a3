"""What a program is: its command, its own files, the libraries that it has loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_cudal1.core import program_text
from torch_cudal1.core.program_text import compute_program_digest
from torch_cudal1.core.refusal import Refusal

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import helper, json
from torch_cudal1.core.program_text import compute_program_digest
print(compute_program_digest())
"""


def run(folder: Path, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return finished.stdout.strip()


def test_it_changes_with_the_command_and_every_file_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    helper = tmp_path / "helper.py"
    helper.write_text("LIMIT = 1")
    first = run(tmp_path, "script.py")
    assert len(first) == 64
    assert run(tmp_path, "script.py") == first
    digests = {first, run(tmp_path, "script.py", "--other")}
    helper.write_text("LIMIT = 2")
    digests.add(run(tmp_path, "script.py"))
    (tmp_path / "script.py").write_text(SCRIPT.replace("json", "argparse, colorsys, helper"))
    digests.add(run(tmp_path, "script.py"))
    assert len(digests) == 4
    # Back to what it was, whatever the times of the files.
    helper.write_text("LIMIT = 1")
    (tmp_path / "script.py").write_text(SCRIPT)
    assert run(tmp_path, "script.py") == first


def test_it_changes_with_the_packages_that_are_installed(tmp_path: Path) -> None:
    """Libraries ask whether others are there, and these need not be loaded."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("")
    first = run(tmp_path, "script.py")
    (tmp_path / "other-1.0.dist-info").mkdir()
    second = run(tmp_path, "script.py")
    (tmp_path / "other-1.0.dist-info").rename(tmp_path / "other-1.1.dist-info")
    assert len({first, second, run(tmp_path, "script.py")}) == 3


def test_a_program_in_no_file_has_none(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("")
    assert "the program is in no file" in run(tmp_path, "-c", SCRIPT)


def test_too_much_source_and_files_that_are_gone_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A worker of pytest has none, and modules of other tests whose files are gone.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    monkeypatch.setattr(program_text, "_iter_files", lambda: [("here", __file__, False)])
    assert isinstance(compute_program_digest(), str)
    with monkeypatch.context() as patch:
        patch.setattr(program_text, "_MAX_OWN_BYTES", 10)
        answer = compute_program_digest()
        assert isinstance(answer, Refusal)
        assert "too many" in answer.reason
    monkeypatch.setattr(program_text, "_iter_files", lambda: [("gone", "/nowhere/gone.py", False)])
    answer = compute_program_digest()
    assert isinstance(answer, Refusal)
    assert "gone cannot be read" in answer.reason
