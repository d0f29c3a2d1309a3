"""A siege counts what got in, by kind."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.siege.__main__ import main, summarise


def test_mutants_are_judged_and_their_twins_pass(tmp_path: Path) -> None:
    out = tmp_path / "siege.json"
    arguments = ["--kinds", "train mode", "--count", "1", "--twins", "--device", "cpu"]
    assert main([*arguments, "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    mutant, twin = document["rows"]
    assert (mutant["kind"], mutant["got_in"], twin["twin_refused"]) == ("train mode", False, False)
    assert mutant["refused_by"]
    assert "text" not in mutant
    assert document["summary"] == {
        "mutants": 1,
        "got_in": 0,
        "twins": 1,
        "twins_refused": 0,
        "kinds": {"train mode": {"tried": 1, "got_in": 0}},
    }


def test_a_summary_counts_by_kind() -> None:
    rows = [
        {"kind": kind, "is_twin": False, "got_in": got_in, "twin_refused": False}
        for kind, got_in in (("a", True), ("a", False), ("b", False))
    ]
    rows.append({"kind": "a", "is_twin": True, "got_in": False, "twin_refused": True})
    assert summarise(rows) == {
        "mutants": 3,
        "got_in": 1,
        "twins": 1,
        "twins_refused": 1,
        "kinds": {"a": {"tried": 2, "got_in": 1}, "b": {"tried": 1, "got_in": 0}},
    }
