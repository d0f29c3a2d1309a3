"""benchmarks/h200/run.sh: lanes side by side, parts of a lane in order, phases in order, and
nothing run of a broken plan.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

PARTS = Path(__file__).parents[2] / "benchmarks" / "h200"
TELLS = 'echo "$CUDA_VISIBLE_DEVICES $(basename "$TORCH_CUDAL1_CACHE_DIR") $*" > "$OUT/$(basename "$0" .sh)-$1.txt"\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with run.sh and three small parts; `nvidia-smi` and Python are stand-ins."""
    parts = tmp_path / "checkout" / "benchmarks" / "h200"
    parts.mkdir(parents=True)
    shutil.copy(PARTS / "run.sh", parts)
    (parts / "tells.sh").write_text(TELLS)
    (parts / "after.sh").write_text('ls "$OUT" > "$OUT/seen.txt"\n')
    (parts / "fails.sh").write_text("exit 3\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {
        "nvidia-smi": "echo GPU 0; echo GPU 1",
        "python-that-works": "cat > /dev/null",
        "broken-python": "exit 1",
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    return tmp_path


def run(
    checkout: Path, plan: str, python: str = "python-that-works"
) -> subprocess.CompletedProcess[str]:
    (checkout / "plan").write_text(plan)
    command = [
        "bash",
        str(checkout / "checkout/benchmarks/h200/run.sh"),
        str(checkout / "out"),
        str(checkout / "plan"),
    ]
    environment = {
        **os.environ,
        "PATH": f"{checkout / 'tools'}:{os.environ['PATH']}",
        "PYTHON": python,
    }
    environment["ARCHIVE"] = str(checkout / "all.tgz")
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def test_lanes_parts_and_phases(checkout: Path) -> None:
    completed = run(checkout, "# a comment\n0 tells:a,b tells:c\n1 tells:d\n--\nall after\n")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    out = checkout / "out"
    outputs = {path.name: path.read_text().strip() for path in out.glob("tells-*.txt")}
    assert outputs == {
        "tells-a,b.txt": "0 cudal1 a,b",
        "tells-c.txt": "0 cudal1 c",
        "tells-d.txt": "1 cudal1 d",
    }
    assert set(outputs) <= set((out / "seen.txt").read_text().split()), (
        "the second phase began before the first had ended"
    )
    with tarfile.open(checkout / "all.tgz") as archive:
        assert "./seen.txt" in archive.getnames()


def test_a_part_that_fails_stops_nothing_and_is_reported(checkout: Path) -> None:
    completed = run(checkout, "0 fails tells:a\n")
    assert completed.returncode == 1
    assert "fails ended with 3" in completed.stdout
    assert (checkout / "out" / "tells-a.txt").exists()


@pytest.mark.parametrize(
    ("plan", "word"), [("0 nothing\n", "'nothing' is no file"), ("2 tells:a\n", "lane '2'")]
)
def test_nothing_is_run_of_a_broken_plan(checkout: Path, plan: str, word: str) -> None:
    completed = run(checkout, f"0 tells:a\n{plan}")
    assert completed.returncode == 2
    assert word in completed.stdout
    assert not list((checkout / "out").glob("tells*"))


def test_nothing_is_run_where_the_set_up_does_not_work(checkout: Path) -> None:
    completed = run(checkout, "0 tells:a\n", python="broken-python")
    assert completed.returncode == 1
    assert not list((checkout / "out").glob("tells*"))


@pytest.mark.parametrize("part", sorted(path.name for path in PARTS.glob("*.sh")))
def test_every_part_is_read_by_bash(part: str) -> None:
    assert subprocess.run(["bash", "-n", str(PARTS / part)], capture_output=True).returncode == 0


@pytest.mark.parametrize("plan", sorted(PARTS.glob("plans/*.plan")), ids=lambda path: path.stem)
def test_plans_name_parts_that_are_there(plan: Path) -> None:
    lanes = [
        line.split()
        for line in plan.read_text().splitlines()
        if line and not line.startswith("#") and line != "--"
    ]
    assert lanes
    for gpu, *parts in lanes:
        assert gpu == "all" or set(gpu.split(",")) <= set("0123")
        assert parts
        assert all((PARTS / f"{part.split(':')[0]}.sh").is_file() for part in parts), plan
