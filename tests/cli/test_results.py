"""A file of results keeps every whole line, whatever a kill left in it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from torch_cudal1.cli.commands import results

KEYS = frozenset({"line", "outcome"})


def test_what_was_appended_is_read_in_order(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for line in (1, 2):
        results.append(out, {"line": line, "outcome": "accepted", "more": None})
    assert [entry["line"] for entry in results.read(out, KEYS)] == [1, 2]
    assert len(out.read_text().splitlines()) == 2


def test_no_file_holds_no_results_and_none_is_written(tmp_path: Path) -> None:
    assert list(results.read(tmp_path / "absent.jsonl", KEYS)) == []
    results.append(None, {"line": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("remains", [b'{"line": 1, "outc', b'{"line": 1}\n{"a": "\xc3', b""])
def test_half_a_line_costs_itself_only(remains: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(remains)
    results.append(out, {"line": 2, "outcome": "refused"})
    assert [entry["line"] for entry in results.read(out, KEYS)] == [2]
    assert out.read_bytes().startswith(remains), "what is there is not rewritten"


@pytest.mark.parametrize("content", ["[1, 2]", '"text"', "3", '{"line": 1}', "", "{}"])
def test_a_line_without_the_keys_is_no_result(content: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content + "\n" + json.dumps({"line": 9, "outcome": "x", "extra": 1}) + "\n")
    assert [entry["line"] for entry in results.read(out, KEYS)] == [9]


def test_a_number_that_json_does_not_know_is_written_as_text(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    results.append(out, {"line": 1, "outcome": "refused", "error": math.inf})
    (entry,) = results.read(out, KEYS)
    assert entry["error"] == "inf"
