"""What lies in a cache's folders, path by path: the material of locks, bundles and coverage.

A file's path below its folder is meant (`v1/<family>/<contract>/<key[:2]>/<key>.safetensors`,
or `v1/alias/...json`). The same path may exist in several folders for several models of one
architecture (H100 and H200 are both sm_90): both are kept apart. It reads whole files and decodes
them as a look-up would; it writes nothing and decides nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import Contract, Entry
from torch_cudal1.store.cache.cache_paths import CachePath, entry_path, parse_cache_path
from torch_cudal1.store.cache.decision_record import open_record
from torch_cudal1.store.cache.entry_file import DecodedEntry, digest_of, encode_plain, open_entry
from torch_cudal1.store.cache.files import iter_files, read_file
from torch_cudal1.store.cache.local_cache import BrokenFile, LocalCache

__all__ = [
    "CacheFile",
    "Inventory",
    "decode_file",
    "take_inventory",
]


@dataclass(frozen=True, eq=False)
class CacheFile:
    """A whole file: where it belongs, where it lies, and the Entry or the decision record's object
    in it.

    `sha256` is of all its bytes; `digest` covers everything but signatures, and is what these and
    revocation lists name.
    """

    relative_path: str
    cache_path: CachePath
    path: Path
    sha256: str
    digest: str
    size_bytes: int
    content: Entry | Mapping[str, Any]

    @property
    def made_for(self) -> str:
        """What tells two files of one path apart: the device model of an entry, the candidates
        that a decision record speaks of.
        """
        if isinstance(self.content, Entry):
            # The path names the family only, and H100 and H200 are both sm_90.
            return self.content.target.sku
        # A record of a whole call is about the choices that were made on one device model; other
        # models of the family have a record with other candidates under the same name.
        candidates = self.content.get("candidates")
        return digest_of(encode_plain(candidates))[:16] if candidates else ""


@dataclass(frozen=True)
class Inventory:
    """Every usable file of the folders, in order of path. A file in an earlier folder hides a file
    for the same purpose in a later folder.
    """

    entries: tuple[CacheFile, ...]
    records: tuple[CacheFile, ...]
    broken: tuple[BrokenFile, ...]

    def select(
        self,
        keys: Collection[str] | None = None,
        families: Collection[str] | None = None,
        contract: Contract | None = None,
    ) -> Inventory:
        """The entries of these regions and families (None: all), with the decision records that
        refer to no other entry.

        `contract`: only entries judged under its precision, with any rights: those are flags of the
        process that runs an entry.
        """

        def has_family(file: CacheFile) -> bool:
            return families is None or file.cache_path.family in families

        entries = tuple(
            file
            for file in self.entries
            if has_family(file)
            and (keys is None or file.cache_path.name in keys)
            and (contract is None or _has_precision(file, contract))
        )
        records = tuple(filter(has_family, self.records))
        # Without a choice of regions every record goes along, also those whose entries are
        # elsewhere.
        if keys is not None:
            keys_and_candidates = _collect_keys_and_candidates(entries)
            records = tuple(
                record for record in records if _is_about_known(record, keys_and_candidates)
            )
        return Inventory(entries, records, self.broken)


def decode_file(data: bytes, relative_path: str, path: Path) -> CacheFile | Refusal:
    """The file `data` as a look-up at `relative_path` would read it; a Refusal where it does not
    decode or belongs elsewhere.
    """
    cache_path = parse_cache_path(relative_path)
    if cache_path is None:
        return Refusal(f"{relative_path!r} is no path of an entry or decision record")
    opened = (
        open_record(data, tuple(relative_path.split("/")[2:]))
        if cache_path.is_record
        else open_entry(data)
    )
    if isinstance(opened, Refusal):
        return opened
    content = opened.entry if isinstance(opened, DecodedEntry) else opened.value
    # `open_record` has compared a decision record's path already.
    if isinstance(content, Entry) and (objection := _check_location(content, relative_path)):
        return objection
    return CacheFile(
        relative_path,
        cache_path,
        path,
        hashlib.sha256(data).hexdigest(),
        opened.digest,
        len(data),
        content,
    )


def _check_location(entry: Entry, relative_path: str) -> Refusal | None:
    """Why `entry` does not belong at `relative_path`."""
    try:
        expected = entry_path(Path(), entry.region_key, entry.target, entry.contract).as_posix()
    except ValueError as error:
        return Refusal(f"unreadable: {error}")
    if expected == relative_path:
        return None
    return Refusal(f"unreadable: it holds the entry of {expected}")


def take_inventory(cache: LocalCache) -> Inventory:
    """Read every file of the cache's folders once, in the order in which a look-up asks them."""
    files: dict[tuple[str, str], CacheFile] = {}
    broken: list[BrokenFile] = []
    for root in (cache.root, *cache.read_only):
        for path in (
            *iter_files(root / "v1", ".safetensors"),
            *iter_files(root / "v1" / "alias", ".json"),
        ):
            file = _read(path, root)
            if isinstance(file, BrokenFile):
                broken.append(file)
            elif file is not None:
                # The first folder wins, as at a look-up.
                files.setdefault((file.relative_path, file.made_for), file)
    # Sorted, so that locks and bundles of equal caches are equal byte by byte.
    ordered = [files[name] for name in sorted(files)]
    entries = tuple(file for file in ordered if not file.cache_path.is_record)
    return Inventory(
        entries, tuple(file for file in ordered if file.cache_path.is_record), tuple(broken)
    )


def _read(path: Path, root: Path) -> CacheFile | BrokenFile | None:
    relative_path = path.relative_to(root).as_posix()
    cache_path = parse_cache_path(relative_path)
    if cache_path is None:
        return BrokenFile(path, "it lies where no entry or decision record belongs")
    data = read_file(path, cache_path.limit_bytes)
    if isinstance(data, Refusal):
        # Absent: purged since the folder was listed.
        return None if data.reason == "absent" else BrokenFile(path, data.reason)
    file = decode_file(data, relative_path, path)
    return BrokenFile(path, file.reason) if isinstance(file, Refusal) else file


def _has_precision(file: CacheFile, contract: Contract) -> bool:
    file_contract = file.content.contract if isinstance(file.content, Entry) else contract
    return (file_contract.precision, file_contract.assume_finite) == (
        contract.precision,
        contract.assume_finite,
    )


def _collect_keys_and_candidates(
    entries: Collection[CacheFile],
) -> dict[tuple[str, str], tuple[set[str], set[str]]]:
    """Region keys and candidates of the entries, by family and contract."""
    known: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for file in entries:
        keys, candidates = known.setdefault(
            (file.cache_path.family, file.cache_path.contract), (set(), set())
        )
        keys.add(file.cache_path.name)
        if isinstance(file.content, Entry):
            candidates.add(file.content.choice.digest)
    return known


def _is_about_known(
    record: CacheFile, keys_and_candidates: Mapping[tuple[str, str], tuple[set[str], set[str]]]
) -> bool:
    """Whether everything a decision record leads to is known for its own family and contract."""
    keys, digests = keys_and_candidates.get(
        (record.cache_path.family, record.cache_path.contract), (set(), set())
    )
    content = record.content if isinstance(record.content, Mapping) else {}
    regions, candidates = content.get("regions"), content.get("candidates")
    # A record that leads to a region or a candidate that is left out would be a miss at every
    # start.
    if isinstance(regions, list):
        return all(isinstance(key, str) and key in keys for key in regions)
    return isinstance(candidates, list) and all(
        isinstance(digest, str) and digest in digests for digest in candidates
    )
