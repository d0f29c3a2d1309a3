"""Copy entries that the searches of a benchmark have made into `kernels_cache/`, which the package
ships.

    python -m benchmarks.ship FOLDER... [--into kernels_cache]

FOLDER: cache folders, such as an unpacked `*-entries.tgz` of `benchmarks/h200/kernelbench.sh`.
Entries with machine code are copied: choices of whole regions, and kernels of fusion groups, which
other models have too. Entries that say that nothing beat the baselines are not: they would keep a
newer version from searching; nor are those of wholes that were composed of blocks, which no judge
has run: they are composed anew of the blocks' entries. Of two entries of one region for one device model the newer one stays.
Above 40 MiB nothing is written. A broken file ends the command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import BY_BLOCKS, Entry
from torch_cudal1.store.cache.files import write_file
from torch_cudal1.store.cache.inventory import CacheFile, take_inventory
from torch_cudal1.store.cache.local_cache import LocalCache

__all__ = ["MAX_SHIPPED_BYTES", "ShippingError", "main", "ship"]

MAX_SHIPPED_BYTES = 40 << 20
_ROOT = Path(__file__).resolve().parents[1]
_FilesByPath: TypeAlias = dict[str, CacheFile]


class ShippingError(RuntimeError):
    """An entry that may not be shipped, or could not be written, and why."""


def ship(folders: Iterable[Path], into: Path) -> tuple[int, int, int]:
    """Copy entries; returns how many of them are new or newer in `into`, how many there are, and
    their bytes. Raises ShippingError.
    """
    newest: _FilesByPath = {}
    before = _list_kernel_entries(into)
    for cache_file in [
        *before.values(),
        *(cache_file for folder in folders for cache_file in _list_kernel_entries(folder).values()),
    ]:
        earlier = newest.get(cache_file.relative_path)
        if earlier is None or _creation_time(earlier) < _creation_time(cache_file):
            newest[cache_file.relative_path] = cache_file
    size = sum(cache_file.size_bytes for cache_file in newest.values())
    if size > MAX_SHIPPED_BYTES:
        raise ShippingError(
            f"{size / (1 << 20):.1f} MiB; at most {MAX_SHIPPED_BYTES >> 20} may come with the package"
        )
    new = [
        cache_file
        for cache_file in newest.values()
        if cache_file is not before.get(cache_file.relative_path)
    ]
    for cache_file in new:
        if isinstance(
            outcome := write_file(into / cache_file.relative_path, cache_file.path.read_bytes()),
            Refusal,
        ):
            raise ShippingError(f"{into / cache_file.relative_path}: {outcome.reason}")
    # locks of the writing just done: what is shipped is never written to
    for lock in into.rglob("*.lock"):
        lock.unlink()
    return len(new), len(newest), size


def _list_kernel_entries(folder: Path) -> _FilesByPath:
    inventory = take_inventory(LocalCache(folder))
    if inventory.broken:
        raise ShippingError(f"{inventory.broken[0].path}: {inventory.broken[0].reason}")
    return {
        cache_file.relative_path: cache_file
        for cache_file in inventory.entries
        if isinstance(cache_file.content, Entry)
        and cache_file.content.choice.program.launches
        and cache_file.content.evidence.get("tier") != BY_BLOCKS
    }


def _creation_time(cache_file: CacheFile) -> str:
    assert isinstance(cache_file.content, Entry)
    return cache_file.content.created


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 where an entry may not be shipped."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.ship", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, default=_ROOT / "kernels_cache")
    args = parser.parse_args(argv)
    if absent := [folder for folder in args.folders if not (folder / "v1").is_dir()]:
        print(f"{absent[0]} is no cache folder: expected one with v1/ in it", file=sys.stderr)
        return 1
    try:
        new, entries, size = ship(args.folders, args.into)
    except ShippingError as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{new} entries are new or newer; {entries} come with the package, {size / (1 << 20):.1f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
