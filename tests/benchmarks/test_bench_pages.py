"""The benchmark of large results: right answers, a row for every size, and what the machine's
kernel offers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import bench_pages
from benchmarks.report import load


def test_every_size_has_a_row_and_the_file_has_the_machine_s_huge_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pages.json"
    assert bench_pages.main(["--mib", "1,2", "--budget-s", "0.2", "--out", str(out)]) == 0
    document = load(out)
    assert [(row["mib"], row["status"]) for row in document["rows"]] == [(1, "ok"), (2, "ok")]
    assert all(row["low"] <= row["speedup"] <= row["high"] for row in document["rows"])
    assert document["transparent_hugepage"] in capsys.readouterr().out
