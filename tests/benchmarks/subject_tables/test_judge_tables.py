"""Tables of the judge: a refused row has its reason, and adversarial cases are counted by outcome."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from benchmarks.subject_tables.judge_tables import tabulate_judge
from tests.benchmarks.subject_tables.documents import write_document


def make_case(
    case: str, side: str, failed: list[str], expected: str = "numerics"
) -> dict[str, Any]:
    return {"case": case, "side": side, "failed": failed, "expected": expected}


def test_a_candidate_has_its_seconds_or_the_reason(tmp_path: Path) -> None:
    seconds = {"first_s": 2.0, "next_s": 1.0, "shared_s": 0.5}
    rows = [
        {"candidate": "softmax", "form": "Program", "status": "ok", **seconds},
        {"candidate": "gelu", "form": "source", "status": "failed", "reason": "refused: numerics"},
    ]
    write_document(tmp_path / "cpu-judge.json", rows)
    lines = tabulate_judge(tmp_path)
    assert "| softmax | Program | 2.00 | 1.00 | 0.50 |" in lines
    assert "| gelu | source | refused: numerics | | |" in lines


def test_identical_sources_have_median_and_range(tmp_path: Path) -> None:
    row = {"source": "relu", "status": "ok", "trials": 3, "accepted": 1}
    row |= {"speedups": [0.9, 1.0, 1.2], "timing_s": [2.0, 1.0, 3.0]}
    write_document(tmp_path / "cpu-same-source.json", [row])
    assert "| relu | 3, 1 | 1.000 | 0.900, 1.200 | 2.00 |" in tabulate_judge(tmp_path)


def test_mutants_are_counted_by_kind_those_that_the_profile_refuses_first(tmp_path: Path) -> None:
    rows = [
        {"kind": "autocast", "is_twin": False, "is_promised": False},
        {"kind": "train mode", "is_twin": False, "is_promised": True},
        {"kind": "train mode", "is_twin": True, "is_promised": True, "twin_refused": False},
    ]
    summary = {
        "promised": 1,
        "promised_got_in": 0,
        "twins": 1,
        "twins_refused": 0,
        "median_s": 10.44,
        "kinds": {
            "autocast": {"tried": 1, "got_in": 1},
            "train mode": {"tried": 1, "got_in": 0},
        },
    }
    path = tmp_path / "h200-siege-fast.json"
    write_document(path, rows)
    document = json.loads(path.read_text())
    document |= {"summary": summary, "options": {"profile": "fast"}}
    path.write_text(json.dumps(document))
    lines = tabulate_judge(tmp_path)
    first = lines.index("| train mode | yes | 1 | 0 |")
    assert lines[first + 1] == "| autocast | no, at a later profile | 1 | 1 |"
    assert "1 mutants of kinds that are refused at this profile, 0 got in." in lines
    assert "| train mode | 1 | 0 |" in lines
    assert "1 judgements of honest twins, 0 refused." in lines
    assert "A judgement took 10.4 s (median)." in lines


def test_cheats_that_were_missed_or_caught_by_another_check_are_named(tmp_path: Path) -> None:
    rows = [
        make_case("a", "cheat", ["numerics"]),
        make_case("b", "cheat", []),
        make_case("c", "cheat", ["timing", "numerics"]),
        make_case("a", "honest", []),
        make_case("b", "honest", ["numerics"]),
    ]
    folder = tmp_path / "adversarial"
    folder.mkdir()
    with gzip.open(folder / "h200.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    lines = tabulate_judge(tmp_path)
    assert "| h200.jsonl.gz | 3 | 5 | 1, b | 1, c | 1, b |" in lines
    # cases that no file of a CPU has
    assert lines[-1].endswith("wrongly: 1 of b (cheat), 1 of b (honest).")
    assert "all files: 3, each side" in lines[-1]
