"""Mutants and twins are judged in processes side by side, each in a new interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernelbench.processes import list_process_tree
from benchmarks.siege import judging
from benchmarks.siege.__main__ import main

ARGUMENTS = ["--kinds", "train mode", "--device", "cpu", "--forked"]
_ROOT = Path(__file__).resolve().parents[3]


def test_processes_judge_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "siege.json"
    command = [sys.executable, "-m", "benchmarks.siege", *ARGUMENTS, "--count", "2"]
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    # As a user starts it: what `-m` calls the main module no spawned process can import.
    subprocess.run(
        [*command, "--jobs", "2", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        timeout=300,
    )
    rows = json.loads(out.read_text())["rows"]
    assert sorted(row["number"] for row in rows) == [0, 1]
    assert all(row["refused_by"] for row in rows)


def test_processes_end_with_the_siege_that_started_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.siege", *ARGUMENTS, "--count", "500"]
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    siege = subprocess.Popen(
        [*command, "--jobs", "2", "--out", str(tmp_path / "siege.json")],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
    )
    try:
        judging_processes = _wait_until(lambda: list_process_tree(siege.pid)[3:])
    finally:
        siege.kill()
        siege.wait()
    assert judging_processes
    _wait_until(lambda: not any(Path(f"/proc/{pid}/cwd").exists() for pid in judging_processes))


def _wait_until(question: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """The answer, once it is true."""
    end = time.monotonic() + limit_s
    while not (answer := question()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return answer


def test_nothing_is_judged_when_the_time_is_up(tmp_path: Path) -> None:
    out = tmp_path / "siege.json"
    assert main([*ARGUMENTS, "--count", "1", "--total-limit-s", "0", "--out", str(out)]) == 0
    assert not out.exists()


def test_an_error_of_the_judge_counts_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*_: object, **__: object) -> None:
        raise ValueError("of the judge")

    monkeypatch.setattr(judging.SourceEvaluator, "evaluate", evaluate)
    out = tmp_path / "siege.json"
    assert main([*ARGUMENTS, "--count", "1", "--sides", "both", "--out", str(out)]) == 1
    document = json.loads(out.read_text())
    assert [row["error"] for row in document["rows"]] == 2 * ["ValueError: of the judge"]
    assert document["summary"]["got_in"] == document["summary"]["twins_refused"] == 1
