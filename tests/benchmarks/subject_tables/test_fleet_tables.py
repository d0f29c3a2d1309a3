"""Tables of several processes: throughput over one worker, and whether all ranks run the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.subject_tables import fleet_tables
from benchmarks.subject_tables.fleet_tables import tabulate_fleet
from tests.benchmarks.subject_tables.documents import write_document


def test_workers_and_ranks_have_a_line_each_or_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_tables, "_FLEET_FILES", ("fleet.json",))
    monkeypatch.setattr(fleet_tables, "_RANK_FILES", ("ranks.json",))
    warmups = [
        {"workers": 4, "tasks": 8, "judged": 9, "status": "ok", "tasks_per_s": 0.5},
        {"workers": 2, "tasks": 4, "judged": 0, "status": "not run", "reason": "needs 2 GPUs"},
    ]
    write_document(tmp_path / "fleet.json", warmups, throughput_over_one={"4": 3.5})
    scene = {"devices": 2, "backend": "gloo", "scene": "data_parallel", "searched": [1, 0]}
    agreed = {**scene, "reason": "", "runs": ["cudal1"], "digests": ["0123456789abcdef"]}
    failed = {**scene, "reason": "rank 1 fell back", "runs": [], "digests": [], "seconds": []}
    write_document(tmp_path / "ranks.json", [{**agreed, "seconds": [1.0, 2.0]}, failed])
    lines = tabulate_fleet(tmp_path)
    assert "| 4 | 8 | 9 | 0.500 | 3.50 |" in lines
    assert "| 2 | 4 | 0 | not run: needs 2 GPUs | |" in lines
    assert "| 2, gloo | data_parallel | cudal1, 0123456789ab | 1, 0 | 2.0 |" in lines
    assert "| 2, gloo | data_parallel | rank 1 fell back | 1, 0 |  |" in lines
