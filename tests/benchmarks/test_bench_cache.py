"""The cache benchmark refuses wrong answers, says which row is over its limit, and writes no path."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks import bench_cache
from torch_cudal1.store.cache.local_cache import LocalCache


def test_it_runs_small_and_writes_its_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_cache, "_LOOKUP_LIMIT_US", 1e9)
    monkeypatch.setattr(bench_cache, "_OPEN_LIMIT_US", 1e9)
    out = tmp_path / "cache.json"
    assert (
        bench_cache.main(
            ["--entries", "20", "--look-ups", "30", "--processes", "2", "--out", str(out)]
        )
        == 0
    )
    saved = json.loads(out.read_text())
    assert (saved["kind"], saved["summary"]) == ("cache", {"over_limit": []})
    assert all(
        0 < row["p10_us"] <= row["median_us"] <= row["p90_us"] or row["name"].startswith("new")
        for row in saved["rows"]
    )
    assert str(tmp_path) not in out.read_text()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["summary"] == saved["summary"]


def test_a_row_over_its_limit_is_named_and_exits_1(tmp_path, monkeypatch):
    rows = [
        bench_cache.LookupRow("slow", 2.0, 1.0, 3.0, 1.5),
        bench_cache.LookupRow("told only", 9.0, 9.0, 9.0, None),
    ]
    monkeypatch.setattr(bench_cache, "measure_lookups", lambda *args: rows)
    out = tmp_path / "cache.json"
    assert bench_cache.main(["--out", str(out)]) == 1
    assert json.loads(out.read_text())["summary"] == {"over_limit": ["slow"]}


def test_an_answer_that_is_not_what_was_put_is_no_time(tmp_path):
    cache = LocalCache(tmp_path)
    (key,) = bench_cache.write_entries(tmp_path, 1, 2, random.Random(0))
    assert len(list(bench_cache.time_lookups(cache, [key], there=True))) == 1
    for there, key_looked_up in ((False, key), (True, "ab" * 32)):
        with pytest.raises(ValueError, match="look-up"):
            list(bench_cache.time_lookups(cache, [key_looked_up], there=there))
