"""A journal gives back every whole record, and never replaces one."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_cudal1.ingest.llm.journal import SampleJournal


def test_records_come_back_and_half_a_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    SampleJournal(path).add("a", {"text": "x"})
    with path.open("ab") as file:
        file.write(b'{"key": "b", "te')
    journal = SampleJournal(path)
    assert (journal.keys(), journal.get("a"), journal.get("b")) == (["a"], {"text": "x"}, None)
    journal.add("b", {"text": "y"})
    assert SampleJournal(path).keys() == ["a", "b"]


def test_a_record_is_never_replaced(tmp_path: Path) -> None:
    journal = SampleJournal(tmp_path / "journal.jsonl")
    journal.add("a", {})
    with pytest.raises(ValueError, match="already has 'a'"):
        journal.add("a", {})
