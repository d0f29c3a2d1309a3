"""A lock is the same text for the same cache, and tells every difference to another one."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.store.bundles import KEY, NAME, OTHER_KEY, fill_cache
from tests.store.conftest import CONTRACT, HERE, make_entry
from torch_cudal1.core.errors import SupplyError
from torch_cudal1.ir.records import Candidate
from torch_cudal1.store.bundle.lockfile import (
    Lock,
    LockDifference,
    diff_lock,
    make_lock,
    read_lock,
    write_lock,
)
from torch_cudal1.store.cache.inventory import take_inventory
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.trust.signatures import create_key, load_signer

TIMING = {
    "speedup": 1.41239,
    "low": 1.38,
    "high": 1.5,
    "candidate_us": 20.0,
    "baseline_us": 28.2,
    "baseline": "eager",
}


def lock_cache(cache: LocalCache, **options: Any) -> Lock:
    return make_lock(take_inventory(cache), **options)


def list_differences(lock: Lock, cache: LocalCache) -> list[tuple[str, str, str]]:
    return [
        (difference.kind, difference.family, difference.key)
        for difference in diff_lock(lock, take_inventory(cache))
    ]


def test_the_text_is_the_same_for_the_same_cache_and_reads_back(tmp_path: Path) -> None:
    write_lock(lock_cache(fill_cache(tmp_path / "a")), tmp_path / "a.lock")
    write_lock(lock_cache(fill_cache(tmp_path / "b"), targets={}), tmp_path / "b.lock")
    text = (tmp_path / "a.lock").read_bytes()
    assert text == (tmp_path / "b.lock").read_bytes()
    assert text.endswith(b"}\n")
    assert max(map(len, text.splitlines())) < 120, "one fact a line"
    assert read_lock(tmp_path / "a.lock") == lock_cache(fill_cache(tmp_path / "a"))
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "a.lock", "b.lock"}


def test_a_diff_of_locks_shows_only_what_changed(tmp_path: Path) -> None:
    cache = fill_cache(tmp_path / "cache")
    write_lock(lock_cache(cache), tmp_path / "old.lock")
    cache.put(make_entry(package="0.2.0"))
    write_lock(lock_cache(cache), tmp_path / "new.lock")
    old, new = ((tmp_path / name).read_text().splitlines() for name in ("old.lock", "new.lock"))
    changed = [after for before, after in zip(old, new, strict=True) if before != after]
    assert [line.split(":")[0].strip() for line in changed] == ['"digest"', '"package"']


def test_gains_are_quoted_only_where_they_were_measured(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache")
    cache.put(make_entry(evidence={"timing": TIMING}))
    cache.put(
        make_entry(region_key=OTHER_KEY, evidence={"timing": TIMING, "granularity": "island"})
    )
    baseline = Candidate(make_entry().choice.program, "eager", "baseline")
    cache.put(make_entry(region_key="11" * 32, choice=baseline, evidence={"timing": None}))
    by_key = {entry.key: entry for entry in lock_cache(cache).entries}
    assert (by_key[KEY].speedup, by_key[KEY].low, by_key[KEY].saved_us) == (1.412, 1.38, 8.2)
    for key in (OTHER_KEY, "11" * 32):
        assert (by_key[key].speedup, by_key[key].low, by_key[key].saved_us) == (None, None, None)


def test_a_cache_that_agrees_has_no_difference(tmp_path: Path) -> None:
    assert (
        list_differences(lock_cache(fill_cache(tmp_path / "a")), fill_cache(tmp_path / "b")) == []
    )


def test_what_is_missing_changed_and_extra_is_told(tmp_path: Path) -> None:
    lock = lock_cache(fill_cache(tmp_path / "a"))
    cache = fill_cache(tmp_path / "b")
    cache.put(make_entry(package="9", region_name="renamed"))
    next((cache.root / "v1").rglob(f"cuda-sm_90/*/*/{KEY}.safetensors")).unlink()
    cache.put(make_entry(region_key="77" * 32))
    cache.put_decision_record(
        NAME, {"winner": "eager", "candidates": [make_entry().choice.digest]}, HERE, CONTRACT
    )
    assert list_differences(lock, cache) == [
        ("changed", "cpu-x86_64", KEY),
        ("changed", "cpu-x86_64", NAME),
        ("extra", "cpu-x86_64", "77" * 32),
        ("missing", "cuda-sm_90", KEY),
    ]
    (changed, *_) = diff_lock(lock, take_inventory(cache))
    assert changed.detail == "region block.0 (Größe) -> renamed, package 0.1.0 -> 9"


def test_an_entry_that_was_damaged_is_missing(tmp_path: Path) -> None:
    cache = fill_cache(tmp_path / "a")
    lock = lock_cache(cache)
    next((cache.root / "v1").rglob(f"{OTHER_KEY}.safetensors")).write_bytes(b"damage")
    assert list_differences(lock, cache) == [("missing", "cpu-x86_64", OTHER_KEY)]


def test_judged_again_with_the_same_outcome_is_a_change_that_says_so(tmp_path: Path) -> None:
    cache = fill_cache(tmp_path / "a")
    lock = lock_cache(cache)
    cache.put(make_entry(created="2026-02-02T00:00:00+00:00"))
    assert diff_lock(lock, take_inventory(cache)) == (
        LockDifference(
            "changed", "cpu-x86_64", KEY, "block.0 (Größe)", "the same choice, judged again"
        ),
    )


def test_signing_changes_no_lock(tmp_path: Path) -> None:
    cache = fill_cache(tmp_path / "cache")
    lock = lock_cache(cache)
    create_key("team", tmp_path / "team.pem", keep_out_of=())
    assert len(cache.sign(load_signer(tmp_path / "team.pem", keep_out_of=())).files) == 4
    assert list_differences(lock, cache) == []


def test_a_lock_of_targets_does_not_speak_of_other_regions_and_families(tmp_path: Path) -> None:
    cache = fill_cache(tmp_path / "cache")
    chosen = take_inventory(cache).select([KEY], ["cpu-x86_64"])
    lock = make_lock(chosen, families=["cpu-x86_64"], targets={"model.py:make": (KEY,)})
    cache.put(make_entry(region_key="77" * 32))
    assert list_differences(lock, cache) == []
    cache.put(make_entry(package="9"))
    assert list_differences(lock, cache) == [("changed", "cpu-x86_64", KEY)]


def test_the_digest_covers_the_program(tmp_path: Path) -> None:
    cache = fill_cache(tmp_path / "cache")
    lock = lock_cache(cache)
    entry = make_entry()
    cache.put(
        make_entry(
            choice=Candidate(
                entry.choice.program, "eager", entry.choice.origin, entry.choice.techniques
            )
        )
    )
    ((kind, family, key), *_) = list_differences(lock, cache)
    assert (kind, family, key) == ("changed", "cpu-x86_64", KEY)


BROKEN = {
    "no JSON": lambda body: b"<<<<<<< ours",
    "another format": lambda body: json.dumps({**body, "format": 2}).encode(),
    "no entries": lambda body: json.dumps(
        {k: v for k, v in body.items() if k != "entries"}
    ).encode(),
    "an entry without its digest": lambda body: json.dumps(
        {**body, "entries": [{"key": KEY}]}
    ).encode(),
    "an entry with a number as a digest": lambda body: json.dumps(_with(body, digest=3)).encode(),
    "a gain that is text": lambda body: json.dumps(_with(body, low="fast")).encode(),
    "a word that is not known": lambda body: json.dumps(_with(body, surprise="x")).encode(),
    "one decision twice, as after a merge": lambda body: json.dumps(
        {**body, "entries": body["entries"][:1] * 2}
    ).encode(),
    "deep nesting": lambda body: b"[" * 200_000,
    "a list": lambda body: b"[]",
}


def _with(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**body, "entries": [{**body["entries"][0], **changes}]}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_lock_is_refused_by_name(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "cudal1.lock"
    lock = lock_cache(fill_cache(tmp_path / "cache"))
    write_lock(lock, path)
    path.write_bytes(change(json.loads(path.read_text())))
    before = path.read_bytes()
    with pytest.raises(SupplyError, match=r"cudal1\.lock refused by rule"):
        read_lock(path)
    with pytest.raises(SupplyError):
        write_lock(lock, path)
    assert path.read_bytes() == before, "what is no lock is not overwritten"


def test_a_full_disk_keeps_the_old_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = lock_cache(fill_cache(tmp_path / "cache"))
    (tmp_path / "out").mkdir()
    write_lock(lock, tmp_path / "out" / "cudal1.lock")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SupplyError, match="No space left"):
        write_lock(Lock((), ()), tmp_path / "out" / "cudal1.lock")
    assert read_lock(tmp_path / "out" / "cudal1.lock") == lock
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["cudal1.lock"]
