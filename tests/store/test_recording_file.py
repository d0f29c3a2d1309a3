"""Calls are appended a line each, summed when they are read, and damaged lines are named."""

from __future__ import annotations

from pathlib import Path

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.recording_file import CallRecord, Mode, append_calls, read_calls

CALL = CallRecord("module", "Net", "3f", "{}", Mode(grad=False, training=False), 2)


def test_equal_calls_are_added_up_and_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    append_calls(path, [CALL])
    append_calls(path, [CALL])
    with path.open("ab") as file:
        file.write(b'{"body": 1}\n')
    contents = read_calls(path)
    assert [call.calls for call in contents.seen] == [4]
    (problem,) = contents.problems
    assert "is not used" in problem


def test_a_file_stays_below_its_limit(tmp_path: Path) -> None:
    refusal = append_calls(tmp_path / "calls.jsonl", [CALL], limit_bytes=10)
    assert isinstance(refusal, Refusal)
    assert "is kept below 10" in refusal.reason
    assert read_calls(tmp_path / "calls.jsonl").seen == ()
