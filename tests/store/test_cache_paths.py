"""Paths in a cache are made of plain names only, and read back strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.conftest import CONTRACT, HERE
from torch_cudal1.store.cache.cache_paths import (
    ENTRY_LIMIT_BYTES,
    RECORD_LIMIT_BYTES,
    CachePath,
    entry_path,
    parse_cache_path,
    record_path,
)

KEY = "ab" * 32


def test_a_path_that_was_made_reads_back() -> None:
    entry = parse_cache_path(entry_path(Path(), KEY, HERE, CONTRACT).as_posix())
    record = parse_cache_path(record_path(Path(), KEY, HERE, CONTRACT).as_posix())
    assert entry == CachePath(HERE.family, CONTRACT.digest, KEY, False)
    assert record == CachePath(HERE.family, CONTRACT.digest, KEY, True)
    assert (entry.limit_bytes, record.limit_bytes) == (ENTRY_LIMIT_BYTES, RECORD_LIMIT_BYTES)


@pytest.mark.parametrize("key", ["", "ab", "../" + KEY, "AB" * 32, KEY + "/x", "g" * 32])
def test_a_key_that_is_no_digest_makes_no_path(key: str) -> None:
    for make in (entry_path, record_path):
        with pytest.raises(ValueError, match="expected the hex digits"):
            make(Path(), key, HERE, CONTRACT)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/v1/cpu-x86_64/0123456789ab/ab/" + KEY + ".safetensors",
        "v1/../0123456789ab/ab/" + KEY + ".safetensors",
        "v1/cpu-x86_64/0123456789ab/cd/" + KEY + ".safetensors",
        "v1/cpu-x86_64/0123456789ab/ab/" + KEY + ".json",
        "v1/alias/cpu-x86_64/0123456789ab/ab/" + KEY + ".safetensors",
        "v2/cpu-x86_64/0123456789ab/ab/" + KEY + ".safetensors",
    ],
)
def test_any_other_path_is_none(path: str) -> None:
    assert parse_cache_path(path) is None
