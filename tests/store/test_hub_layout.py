"""Index files of a repository read back as they were written, split when large, refuse the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.store.conftest import CONTRACT, HERE
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.hub.hub_layout import (
    SPLIT_ROWS,
    FileListing,
    Root,
    Shard,
    TargetIndex,
    repository_file,
    sort_by_closeness,
    target_id,
)

KEY = "ab" * 32
LISTING = FileListing("cd" * 32, 10, "2026-01-01T00:00:00+00:00")


def test_every_index_reads_back() -> None:
    root = Root({target_id(HERE): (HERE, LISTING)})
    shards = TargetIndex({CONTRACT.digest: {"": LISTING, "ab": LISTING}})
    shard = Shard({KEY: LISTING}, {KEY: LISTING})
    assert Root.read(root.write()) == root
    assert TargetIndex.read(shards.write()) == shards
    assert Shard.read(shard.write()) == shard
    assert shards.find_shard_prefix(CONTRACT.digest, KEY) == "ab"
    assert shards.find_shard_prefix("0" * 12, KEY) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'{"format": 2}', b"[" * 100_000])
def test_what_is_no_index_is_refused(content: bytes) -> None:
    for kind in (Root, TargetIndex, Shard):
        assert isinstance(kind.read(content), Refusal)


def test_a_large_shard_is_split_by_prefix_and_loses_nothing() -> None:
    keys = [f"{number % 16:x}{number:063x}" for number in range(SPLIT_ROWS + 1)]
    parts = Shard(dict.fromkeys(keys, LISTING)).split("")
    assert len(parts) == 16
    assert {key for part in parts.values() for key in part.entries} == set(keys)
    assert all(key.startswith(prefix) for prefix, part in parts.items() for key in part.entries)


def test_the_closest_target_of_the_same_family_comes_first() -> None:
    other_torch, other_sku = replace(HERE, torch="0.0"), replace(HERE, sku="another")
    foreign = replace(HERE, device="cuda", arch="sm_90")
    root = Root({target_id(t): (t, LISTING) for t in (other_sku, foreign, other_torch, HERE)})
    assert [target for _, target in sort_by_closeness(root, HERE)] == [HERE, other_torch, other_sku]


def test_a_file_name_is_made_of_digests_only() -> None:
    with pytest.raises(ValueError, match="hex digits"):
        repository_file("entry", "../x", HERE, CONTRACT.digest)
