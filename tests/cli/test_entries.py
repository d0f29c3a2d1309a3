"""`list`, `show`, `verify`, `purge` over a real cache folder, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.cache_cases import damage, put_entry, run_command
from torch_cudal1.__main__ import main


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    put_entry(tmp_path, 4, "first")
    put_entry(tmp_path, 8, "second")
    return tmp_path


def test_an_empty_cache_lists_nothing_and_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(capsys, "list", "--cache-dir", str(tmp_path / "absent")) == (
        0,
        f"0 entries in {tmp_path / 'absent'}\n",
    )
    assert not (tmp_path / "absent").exists()


def test_list_shows_every_entry(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_command(capsys, "list", "--cache-dir", str(cache))
    assert code == 0
    assert all(part in out for part in ("first", "second", "a CPU", "eager", "2026-01-02"))


def test_list_as_json_carries_the_whole_key(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out = run_command(capsys, "list", "--json", "--cache-dir", str(cache))
    listed_entries = json.loads(out)["entries"]
    assert {len(entry["key"]) for entry in listed_entries} == {64}
    assert {entry["speedup_at_least"] for entry in listed_entries} == {1.0}


def test_show_takes_the_start_of_a_key_and_tells_why_others_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = put_entry(tmp_path, 4, "first")
    code, out = run_command(capsys, "show", entry.region_key[:10], "--cache-dir", str(tmp_path))
    assert code == 0
    assert "numerics" in out
    assert "lower bound 1.01x" in " ".join(out.split())
    _, out = run_command(
        capsys, "show", entry.region_key[:10], "--json", "--cache-dir", str(tmp_path)
    )
    assert json.loads(out)[0]["program"]["steps"][0]["target"] == "aten.relu.default"


@pytest.mark.parametrize(("key", "reason"), [("", "it fits 2"), ("zzzz", "it fits none")])
def test_a_key_that_fits_none_or_several_is_a_usage_error(
    cache: Path, key: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", key, "--cache-dir", str(cache)]) == 2
    assert reason in capsys.readouterr().err


def test_verify_is_0_for_whole_entries_and_1_for_a_flipped_bit(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(capsys, "verify", "--cache-dir", str(cache))[0] == 0
    path = damage(cache)
    code, out = run_command(capsys, "verify", "--json", "--cache-dir", str(cache))
    assert code == 1
    document = json.loads(out)
    assert document["whole"] == 1
    assert [b["path"] for b in document["broken"]] == [str(path)]


def test_list_show_and_verify_say_what_was_tuned_without_inductor(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = ("--cache-dir", str(cache))
    for command in ("list", "verify"):
        assert "without Inductor" not in run_command(capsys, command, *folder)[1]
    evidence = {
        "baselines_us": {"eager": 3.0},
        "baseline_failures": {"inductor": "no C++ compiler"},
    }
    entry = put_entry(cache, 16, "third", **evidence)
    for command in ("list", "verify"):
        code, out = run_command(capsys, command, *folder)
        assert code == 0
        assert "1 entry was tuned without Inductor and never measured beside it" in out
    assert run_command(capsys, "list", *folder)[1].count("eager (tuned") == 1
    shown = run_command(capsys, "show", entry.region_key, *folder)[1]
    assert [
        line.split("  ")[-1].strip() for line in shown.splitlines() if line.startswith("tuned")
    ] == ["no C++ compiler"]
    listed = json.loads(run_command(capsys, "list", "--json", *folder)[1])["entries"]
    assert sorted(row["without_inductor"] for row in listed) == ["", "", "no C++ compiler"]
    verified = json.loads(run_command(capsys, "verify", "--json", *folder)[1])["without_inductor"]
    assert [row["reason"] for row in verified] == ["no C++ compiler"]
