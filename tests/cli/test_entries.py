"""`list`, `show`, `verify`, `purge` over a real cache folder, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torch_cudal1.__main__ import main
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import Candidate, Contract, Entry, Region, Target
from torch_cudal1.store.cache.local_cache import LocalCache, Stored

TARGET = Target("cpu", "x86_64", "a CPU", "", "2.13.0", "")


def stored(root: Path, size: int, name: str, **more: Any) -> Entry:
    """Put a baseline entry of relu over `size` elements into the cache, with `more` evidence."""
    spec = TensorSpec("float32", (size,), (1,), "cpu")
    program = Program((spec,), (Aten("aten.relu.default", (Value(0),), (), (1,)),), (1,))
    region = Region(program, ("input",), name=name)
    tried = (
        {
            "label": "fold -> eager",
            "decision": "rejected",
            "detector": "timing",
            "reason": "lower bound 1.01x, 1.05x is needed",
        },
    )
    evidence = {
        "checks": [{"name": "numerics", "passed": True, "value": 1.0, "limit": 2.0, "detail": ""}],
        **more,
    }
    choice = Candidate(program, "eager", "baseline")
    entry = Entry(
        region.key,
        name,
        TARGET,
        Contract(),
        choice,
        evidence,
        tried,
        "2026-01-02T03:04:05+00:00",
        "0.1.0",
    )
    assert isinstance(LocalCache(root).put(entry), Stored)
    return entry


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    stored(tmp_path, 4, "first")
    stored(tmp_path, 8, "second")
    return tmp_path


def damage(root: Path) -> Path:
    path = sorted(root.rglob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(list(arguments))
    return code, capsys.readouterr().out


def test_an_empty_cache_lists_nothing_and_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "list", "--cache-dir", str(tmp_path / "absent")) == (
        0,
        f"0 entries in {tmp_path / 'absent'}\n",
    )
    assert not (tmp_path / "absent").exists()


def test_list_shows_every_entry(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "list", "--cache-dir", str(cache))
    assert code == 0
    assert all(part in out for part in ("first", "second", "a CPU", "eager", "2026-01-02"))


def test_list_as_json_carries_the_whole_key(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out = run(capsys, "list", "--json", "--cache-dir", str(cache))
    found = json.loads(out)["entries"]
    assert {len(entry["key"]) for entry in found} == {64}
    assert {entry["speedup_at_least"] for entry in found} == {1.0}


def test_show_takes_the_start_of_a_key_and_tells_why_others_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = stored(tmp_path, 4, "first")
    code, out = run(capsys, "show", entry.region_key[:10], "--cache-dir", str(tmp_path))
    assert code == 0
    assert "numerics" in out
    assert "lower bound 1.01x" in " ".join(out.split())
    _, out = run(capsys, "show", entry.region_key[:10], "--json", "--cache-dir", str(tmp_path))
    assert json.loads(out)[0]["program"]["steps"][0]["target"] == "aten.relu.default"


@pytest.mark.parametrize(("key", "told"), [("", "it fits 2"), ("zzzz", "it fits none")])
def test_a_key_that_fits_none_or_several_is_a_usage_error(
    cache: Path, key: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", key, "--cache-dir", str(cache)]) == 2
    assert told in capsys.readouterr().err


def test_verify_is_0_for_whole_entries_and_1_for_a_flipped_bit(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "verify", "--cache-dir", str(cache))[0] == 0
    path = damage(cache)
    code, out = run(capsys, "verify", "--json", "--cache-dir", str(cache))
    assert code == 1
    told = json.loads(out)
    assert told["whole"] == 1
    assert [b["path"] for b in told["broken"]] == [str(path)]


def test_list_show_and_verify_say_what_was_tuned_without_inductor(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = ("--cache-dir", str(cache))
    for command in ("list", "verify"):
        assert "without Inductor" not in run(capsys, command, *folder)[1]
    raced = {"baselines_us": {"eager": 3.0}, "baseline_failures": {"inductor": "no C++ compiler"}}
    entry = stored(cache, 16, "third", **raced)
    for command in ("list", "verify"):
        code, out = run(capsys, command, *folder)
        assert code == 0
        assert "1 entry was tuned without Inductor and never measured beside it" in out
    assert run(capsys, "list", *folder)[1].count("eager (tuned") == 1
    shown = run(capsys, "show", entry.region_key, *folder)[1]
    assert [
        line.split("  ")[-1].strip() for line in shown.splitlines() if line.startswith("tuned")
    ] == ["no C++ compiler"]
    listed = json.loads(run(capsys, "list", "--json", *folder)[1])["entries"]
    assert sorted(one["without_inductor"] for one in listed) == ["", "", "no C++ compiler"]
    verified = json.loads(run(capsys, "verify", "--json", *folder)[1])["without_inductor"]
    assert [one["reason"] for one in verified] == ["no C++ compiler"]


def test_purge_without_yes_deletes_nothing(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "purge", "--cache-dir", str(cache))
    assert code == 0
    assert "2 files would be deleted" in out
    assert len(list(cache.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize(("options", "left"), [([], 0), (["--broken"], 1)])
def test_purge_with_yes_deletes_what_was_asked(
    cache: Path, options: list[str], left: int, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(cache)
    assert main(["purge", "--yes", *options, "--cache-dir", str(cache)]) == 0
    assert len(list(cache.rglob("*.safetensors"))) == left


@pytest.mark.parametrize("options", [[], ["--yes"]])
def test_purge_of_a_key_that_fits_nothing_deletes_nothing_and_is_2(
    cache: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(cache)
    assert main(["purge", "nokey", *options, "--cache-dir", str(cache)]) == 2
    assert "'nokey'; expected the start of a key of `cudal1 list`" in capsys.readouterr().err
    assert len(list(cache.rglob("*.safetensors"))) == 2


def test_purge_by_key_leaves_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry, other = stored(tmp_path, 4, "first"), stored(tmp_path, 8, "second")
    assert main(["purge", entry.region_key[:16], "--yes", "--cache-dir", str(tmp_path)]) == 0
    assert [path.stem for path in tmp_path.rglob("*.safetensors")] == [other.region_key]
