"""What comes with the package is kernels, whole, the newer of two, and no more than 40 MiB."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ship
from tests.ir.test_check import KERNEL
from tests.store.conftest import make_entry
from torch_cudal1.ir.records import BY_BLOCKS, Candidate, Entry
from torch_cudal1.store.cache.inventory import CacheFile, take_inventory
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.trust.trust_policy import SHIPPED

WITH_KERNEL = Candidate(KERNEL, "eager", "builtin", ("gemm",))


def fill_cache(folder: Path, *entries: Entry) -> Path:
    for entry in entries:
        LocalCache(folder).put(entry)
    return folder


def make_kernel_entry(number: int, **changes: Any) -> Entry:
    return make_entry(region_key=f"{number:02x}" * 32, **{"choice": WITH_KERNEL, **changes})


def test_kernels_are_taken_and_what_holds_none_is_left(tmp_path: Path) -> None:
    baseline = make_kernel_entry(
        2,
        choice=Candidate(
            replace(KERNEL, steps=(), outputs=(0,), payloads={}), "inductor", "baseline"
        ),
    )
    composed = make_kernel_entry(3, evidence={"tier": BY_BLOCKS})
    source = fill_cache(
        tmp_path / "searched", make_kernel_entry(1), baseline, composed, make_entry()
    )
    into = tmp_path / "shipped"
    assert ship.ship([source], into)[:2] == (1, 1)
    assert [cache_file.content.region_key for cache_file in list_entries(into)] == ["01" * 32]
    assert not list(into.rglob("*.lock"))
    assert ship.ship([source], into)[:2] == (0, 1)


def test_the_newer_of_two_stays(tmp_path: Path) -> None:
    into = tmp_path / "shipped"
    old, new = (
        make_kernel_entry(1, created=f"202{year}-01-01T00:00:00+00:00", package=str(year))
        for year in (5, 6)
    )
    ship.ship([fill_cache(tmp_path / "a", new), fill_cache(tmp_path / "b", old)], into)
    assert ship.ship([tmp_path / "b"], into)[0] == 0
    (cache_file,) = list_entries(into)
    assert cache_file.content.package == "6"


def test_more_than_40_mib_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    large = replace(KERNEL, payloads={"k": torch.zeros(1 << 20, dtype=torch.uint8)})
    source = fill_cache(
        tmp_path / "searched", make_kernel_entry(1, choice=replace(WITH_KERNEL, program=large))
    )
    monkeypatch.setattr(ship, "MAX_SHIPPED_BYTES", 1 << 20)
    assert ship.main([str(source), "--into", str(tmp_path / "shipped")]) == 1
    assert "at most 1 may" in capsys.readouterr().err
    assert not (tmp_path / "shipped").exists()


def test_a_broken_file_and_a_folder_that_is_no_cache_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = fill_cache(tmp_path / "searched", make_kernel_entry(1))
    (path,) = source.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    assert ship.main([str(source), "--into", str(tmp_path / "shipped")]) == 1
    assert str(path) in capsys.readouterr().err
    assert ship.main([str(tmp_path / "nowhere"), "--into", str(tmp_path / "shipped")]) == 1
    assert "is no cache folder" in capsys.readouterr().err


def list_entries(folder: Path) -> tuple[CacheFile, ...]:
    return take_inventory(LocalCache(folder)).entries


def test_what_the_package_holds_can_be_read_and_is_for_hopper() -> None:
    inventory = take_inventory(LocalCache(SHIPPED))
    assert inventory.broken == ()
    assert inventory.records == ()
    assert len(inventory.entries) > 100
    assert sum(cache_file.size_bytes for cache_file in inventory.entries) <= ship.MAX_SHIPPED_BYTES
    for cache_file in inventory.entries:
        assert isinstance(cache_file.content, Entry)
        assert cache_file.content.target.family == "cuda-sm_90"
        assert cache_file.content.choice.program.launches, cache_file.relative_path
        evidence = cache_file.content.evidence
        assert evidence["granularity"] == "island" or evidence["timing"]["low"] >= 1.05, (
            cache_file.relative_path
        )
        assert evidence["granularity"] == "island" or len(evidence["checks"]) > 20, (
            cache_file.relative_path
        )
        assert all(check["passed"] for check in evidence["checks"]), cache_file.relative_path
    other_files = {
        path for path in SHIPPED.rglob("*") if path.is_file() and path.suffix != ".safetensors"
    }
    assert other_files == {SHIPPED / "README.md"}
