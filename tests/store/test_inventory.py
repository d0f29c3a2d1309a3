"""An inventory has every usable file once, and tells which decision records need nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.store.bundles import KEY, NAME, OTHER_KEY, fill_cache
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.cache.inventory import decode_file, take_inventory


def test_everything_is_listed_and_only_selects(tmp_path: Path) -> None:
    inventory = take_inventory(fill_cache(tmp_path))
    assert {file.cache_path.name for file in inventory.entries} == {KEY, OTHER_KEY}
    assert [file.cache_path.name for file in inventory.records] == [NAME]
    assert inventory.broken == ()
    selected = inventory.select(keys={OTHER_KEY})
    assert [file.cache_path.name for file in selected.entries] == [OTHER_KEY]


def test_a_damaged_file_is_broken_and_hides_no_other(tmp_path: Path) -> None:
    cache = fill_cache(tmp_path)
    first = take_inventory(cache).entries[0]
    first.path.write_bytes(b"damaged")
    inventory = take_inventory(cache)
    assert [file.path for file in inventory.broken] == [first.path]
    assert len(inventory.entries) == 2


def test_a_file_that_belongs_elsewhere_is_refused(tmp_path: Path) -> None:
    first, second, *_ = take_inventory(fill_cache(tmp_path)).entries
    content = first.path.read_bytes()
    assert isinstance(decode_file(content, second.relative_path, first.path), Refusal)
    assert isinstance(decode_file(content, "elsewhere", first.path), Refusal)
