"""Decision records come back whole from the cache, or are refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.conftest import CONTRACT, HERE
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import Contract
from torch_cudal1.store.cache.cache_paths import record_path
from torch_cudal1.store.cache.decision_record import call_name
from torch_cudal1.store.cache.files import Stored
from torch_cudal1.store.cache.local_cache import LocalCache

NAME = "cd" * 32
RECORD = {"regions": ["ab", "cd"], "speedup": float("inf"), "whole": None, "nested": {"low": 1.07}}


def test_a_decision_record_comes_back(cache: LocalCache) -> None:
    assert cache.get_decision_record(NAME, HERE, CONTRACT) == Refusal("absent")
    stored = cache.put_decision_record(NAME, RECORD, HERE, CONTRACT)
    assert stored == Stored(
        cache.root / "v1" / "alias" / "cpu-x86_64" / CONTRACT.digest / "cd" / f"{NAME}.json"
    )
    assert cache.get_decision_record(NAME, HERE, CONTRACT) == RECORD
    assert cache.get_decision_record(NAME, HERE, Contract("strict")) == Refusal("absent")
    elsewhere = LocalCache(cache.root.parent / "empty", (cache.root,)).get_decision_record(
        NAME, HERE, CONTRACT
    )
    assert isinstance(elsewhere, Refusal)
    assert "nobody signed it" in elsewhere.reason


def test_every_flipped_bit_of_a_decision_record_is_a_miss(cache: LocalCache) -> None:
    cache.put_decision_record(NAME, RECORD, HERE, CONTRACT)
    path = record_path(cache.root, NAME, HERE, CONTRACT)
    content = path.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        path.write_bytes(flipped)
        assert isinstance(cache.get_decision_record(NAME, HERE, CONTRACT), Refusal), place


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"body": 1, "digest": 2}'],
    ids=repr,
)
def test_a_file_that_is_no_decision_record_is_a_miss(cache: LocalCache, text: bytes) -> None:
    cache.put_decision_record(NAME, RECORD, HERE, CONTRACT)
    record_path(cache.root, NAME, HERE, CONTRACT).write_bytes(text)
    miss = cache.get_decision_record(NAME, HERE, CONTRACT)
    assert isinstance(miss, Refusal)
    assert "unreadable" in miss.reason


def test_a_decision_record_under_another_name_is_a_miss(cache: LocalCache) -> None:
    cache.put_decision_record(NAME, RECORD, HERE, CONTRACT)
    other = record_path(cache.root, "cd00" * 16, HERE, CONTRACT)
    other.write_bytes(record_path(cache.root, NAME, HERE, CONTRACT).read_bytes())
    assert isinstance(cache.get_decision_record("cd00" * 16, HERE, CONTRACT), Refusal)


def test_a_decision_record_must_be_plain_json(cache: LocalCache) -> None:
    assert isinstance(cache.put_decision_record(NAME, {"x": object()}, HERE, CONTRACT), Refusal)
    assert isinstance(cache.put_decision_record("../x", {}, HERE, CONTRACT), Refusal)


def test_the_name_of_a_call_depends_on_its_regions_and_their_order() -> None:
    assert call_name(["a", "b"]) == call_name(iter(["a", "b"]))
    assert len({call_name(["a", "b"]), call_name(["b", "a"]), call_name(["a"])}) == 3


@pytest.fixture
def cache(tmp_path: Path) -> LocalCache:
    return LocalCache(tmp_path / "cache")
