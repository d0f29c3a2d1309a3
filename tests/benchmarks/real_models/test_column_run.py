"""A column's process as its runner sees it: late, gone, or hanging, it is a reason and no hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.real_models import column_run
from benchmarks.real_models.column_run import ColumnRun, await_preparation, end, sample


def start(program: str, folder: Path) -> ColumnRun:
    """A process of Python that runs `program` in the place of a column's."""
    log = folder / "log.txt"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
    return ColumnRun("a model", "a column", process, log)


def test_a_process_that_is_ready_is_sampled(tmp_path: Path) -> None:
    program = "print('{\"first_call_s\": 1.0}'); input(); print('{\"us\": [3.0, 4.0]}'); input()"
    run = start(program, tmp_path)
    try:
        await_preparation([run], 60.0)
        assert run.is_ready
        sample(run)
        assert run.rounds == [[3.0, 4.0]]
    finally:
        end(run)
    assert run.process.poll() is not None


def test_a_process_that_ends_or_is_late_has_failed_with_its_last_word(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    ended = start("raise SystemExit('no such model')", tmp_path)
    late = start("input()", tmp_path / "second")
    try:
        await_preparation([ended, late], 5.0)
    finally:
        end(ended)
        end(late)
    assert ended.facts == {"failed": "ended: no such model"}
    assert late.facts == {"failed": "not ready in 5 s"}


def test_a_process_that_hangs_in_a_sample_has_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_run, "ANSWER_LIMIT_S", 0.2)
    run = start("print('{\"first_call_s\": 1.0}'); input(); input()", tmp_path)
    try:
        await_preparation([run], 60.0)
        sample(run)
        assert run.facts == {"failed": "hangs"}
        sample(run)
    finally:
        end(run)
    assert run.rounds == []
