"""A siege counts what got in, by kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.siege import judging
from benchmarks.siege.__main__ import keep_cores_busy, main, summarise
from benchmarks.siege.faults import Mutant


def list_children() -> set[str]:
    threads = Path("/proc/self/task").iterdir()
    return {pid for thread in threads for pid in (thread / "children").read_text().split()}


ARGUMENTS = ["--kinds", "train mode", "--count", "1", "--device", "cpu", "--forked"]


def test_mutants_are_judged_and_their_twins_pass(tmp_path: Path) -> None:
    out = tmp_path / "siege.json"
    assert main([*ARGUMENTS, "--sides", "both", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    mutant, twin = document["rows"]
    assert (mutant["kind"], mutant["got_in"], twin["twin_refused"]) == ("train mode", False, False)
    assert mutant["refused_by"]
    assert "text" not in mutant
    assert document["options"]["sides"] == "both"
    assert document["summary"].pop("median_s") > 0
    assert document["summary"] == {
        "mutants": 1,
        "got_in": 0,
        "promised": 1,
        "promised_got_in": 0,
        "twins": 1,
        "twins_refused": 0,
        "kinds": {"train mode": {"tried": 1, "got_in": 0}},
    }


@pytest.mark.parametrize("sides", ["mutants", "twins"])
def test_one_side_is_judged_in_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sides: str
) -> None:
    def judge(mutant: Mutant, text: str, *_: object) -> dict[str, object]:
        assert text == (mutant.text if sides == "mutants" else mutant.twin)
        row: dict[str, object] = {"kind": "", "subject": "", "is_promised": True, "seconds": 1.0}
        return row | {"refused_by": "a", "error": "", "checks": []}

    monkeypatch.setattr(judging, "_judge", judge)
    out = tmp_path / "siege.json"
    status = main([*ARGUMENTS[:-1], "--sides", sides, "--rounds", "3", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["number"] for row in rows] == [0, 0, 0]
    assert [row["is_twin"] for row in rows] == 3 * [sides == "twins"]
    # A refused mutant is as it shall be, and a refused twin is kept with its text.
    assert status == (sides == "twins")
    for key in ("text", "checks"):
        assert [(key in row) for row in rows] == 3 * [sides == "twins"]


@pytest.mark.parametrize("is_promised", [True, False])
def test_what_got_in_is_kept_where_the_profile_promises_to_refuse_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_promised: bool
) -> None:
    accepted = {"kind": "", "subject": "", "seconds": 1.0, "refused_by": "", "error": ""}
    row = accepted | {"is_promised": is_promised, "checks": []}
    monkeypatch.setattr(judging, "_judge", lambda *_: dict(row))
    out = tmp_path / "siege.json"
    assert main([*ARGUMENTS[:-1], "--out", str(out)]) == is_promised
    (kept,) = json.loads(out.read_text())["rows"]
    assert kept["got_in"]
    assert ("text" in kept) is is_promised


def test_cores_are_kept_busy_within_the_block() -> None:
    own = list_children()
    with keep_cores_busy(2):
        assert len(list_children() - own) == 2
    assert list_children() == own


def test_a_summary_counts_by_kind() -> None:
    rows = [
        {"kind": kind, "is_twin": False, "got_in": got_in, "twin_refused": False}
        for kind, got_in in (("a", True), ("a", False), ("b", False))
    ]
    rows.append({"kind": "a", "is_twin": True, "got_in": False, "twin_refused": True})
    rows = [{**row, "is_promised": row["kind"] == "b", "seconds": 2.0} for row in rows]
    assert summarise(rows) == {
        "mutants": 3,
        "got_in": 1,
        "promised": 1,
        "promised_got_in": 0,
        "twins": 1,
        "twins_refused": 1,
        "median_s": 2.0,
        "kinds": {"a": {"tried": 2, "got_in": 1}, "b": {"tried": 1, "got_in": 0}},
    }
