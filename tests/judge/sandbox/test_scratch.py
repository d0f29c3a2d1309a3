"""A folder goes with its judge, also where the judge is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.sandbox import scratch
from torch_cudal1.judge.sandbox.scratch import make_scratch, remove_orphans, remove_scratch

JUDGE = """
import sys, time
from pathlib import Path
from torch_cudal1.judge.sandbox import scratch
scratch._SHARED_MEMORY = Path(sys.argv[1])
folder = scratch.make_scratch()
(folder / "tensors").write_bytes(bytes(1000))
print(folder, flush=True)
time.sleep(120)
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scratch, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(scratch, "_ROOMY_BYTES", 0)
    return tmp_path


def test_a_folder_is_private_and_goes_with_its_lock(parent: Path) -> None:
    folder = make_scratch()
    assert folder.parent == parent
    assert "cudal1" not in folder.name
    assert len(list(parent.iterdir())) == 2
    assert folder.stat().st_mode & 0o077 == 0
    (folder / "file").touch()
    remove_scratch(folder)
    remove_scratch(folder)
    assert list(parent.iterdir()) == []


def test_what_a_killed_judge_left_behind_is_removed_and_what_a_living_one_has_is_not(
    parent: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", JUDGE, str(parent)], stdout=subprocess.PIPE, text=True
    ) as judge:
        assert judge.stdout is not None
        orphan = Path(judge.stdout.readline().strip())
        assert orphan.is_dir()
        assert orphan.parent in (parent, Path("/tmp"))
        own = make_scratch()
        os.utime(scratch._find_lock_file(orphan), (0, 0))
        assert remove_orphans(orphan.parent) == []
        assert (orphan / "tensors").exists()
        judge.send_signal(signal.SIGKILL)
        judge.wait()
    os.utime(scratch._find_lock_file(orphan))
    assert orphan not in remove_orphans(orphan.parent), "it may be just being made"
    os.utime(scratch._find_lock_file(orphan), (0, 0))
    assert orphan in remove_orphans(orphan.parent)
    assert not orphan.exists()
    assert not scratch._find_lock_file(orphan).exists()
    assert own.is_dir()
    remove_scratch(own)


def test_a_process_that_was_forked_and_ends_releases_nothing(parent: Path) -> None:
    folder = make_scratch()
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    os.utime(scratch._find_lock_file(folder), (0, 0))
    assert remove_orphans(parent) == []
    assert folder.is_dir()
    remove_scratch(folder)


def test_a_link_in_the_place_of_a_lock_is_left_alone(parent: Path) -> None:
    (parent / "precious").mkdir()
    (parent / ".cudal1-precious.lock").symlink_to(parent / "precious")
    assert remove_orphans(parent) == []
    assert (parent / "precious").is_dir()


def test_without_a_place_for_it_there_is_no_folder(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_SHARED_MEMORY", parent / "absent")
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(parent / "absent"))
    with pytest.raises(SandboxError, match="no scratch folder"):
        make_scratch()


def test_a_folder_that_gets_no_lock_is_removed(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> int:
        raise OSError(f"no lock for {path.name}")

    monkeypatch.setattr(scratch, "_lock_file", refuse)
    before = set(parent.iterdir())
    with pytest.raises(SandboxError, match="no lock for"):
        make_scratch()
    assert set(parent.iterdir()) == before
