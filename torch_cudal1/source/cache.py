"""The cache on disk: one file per (region, target family, contract), and small alias records beside them.

    <root>/v1/<family>/<contract digest>/<key[:2]>/<key>.safetensors
    <root>/v1/alias/<family>/<contract digest>/<name[:2]>/<name>.json

One root is written; further roots are only read. A file that is damaged, foreign or in the wrong place is a miss. A hit judged
under another torch, Triton, driver or SKU is returned with that reason. It runs nothing, and trusts whoever may write the folder.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.errors import ProgramError
from torch_cudal1.records import Contract, Entry, Miss, Region, Target
from torch_cudal1.source.entry_file import decode_entry, decode_golden, digest_of, encode_entry, plain, unplain
from torch_cudal1.source.resolve import Hit
from torch_cudal1.source.store import (
    LockState,
    NotStored,
    Stored,
    files_under,
    hold,
    read_file,
    remove_leftovers,
    write_file,
)

__all__ = ["Broken", "Found", "Hit", "LocalCache", "LockState", "NotStored", "Purged", "Stored", "decode_alias", "stale_reason"]

_VERSION = "v1"
_ENTRY_LIMIT_BYTES = 4 << 30
_ALIAS_LIMIT_BYTES = 64 << 20
_KEY = re.compile(r"[0-9a-f]{16,128}")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")


@dataclass(frozen=True)
class Found:
    """A file of the cache and the entry in it."""

    path: Path
    entry: Entry


@dataclass(frozen=True)
class Broken:
    """A file that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Purged:
    """What `purge` deleted, and what it could not."""

    entries: tuple[Path, ...]
    aliases: tuple[Path, ...]
    leftovers: tuple[Path, ...]
    failed: tuple[Broken, ...]


@dataclass(frozen=True)
class LocalCache:
    """A writable cache folder, and read-only ones asked after it. Holds no state: any number of processes may use one folder."""

    root: Path
    read_only: Sequence[Path] = field(default=())
    name: str = "local cache"

    def find(self, region: Region, target: Target, contract: Contract) -> Hit | Miss:
        """`get` by the region's key: what makes this a `Source`."""
        return self.get(region.key, target, contract)

    def get(self, key: str, target: Target, contract: Contract) -> Hit | Miss:
        """The first fresh entry of all folders, else the first stale one, else why there is none. ValueError for a bad key."""
        stale: Hit | None = None
        reasons: list[str] = []
        for root in (self.root, *self.read_only):
            path = entry_path(root, key, target, contract)
            found = _read_entry(path, root)
            if isinstance(found, Miss):
                reasons += [] if found.reason == "absent" else [f"{path}: {found.reason}"]
                continue
            hit = Hit(found, str(path), stale_reason(found.target, target))
            if hit.stale is None:
                return hit
            stale = stale or hit
        return stale or Miss("; ".join(reasons) or "absent")

    def golden(self, hit: Hit) -> dict[str, torch.Tensor] | Miss:
        """The golden vectors stored with a hit, for re-validation."""
        data = read_file(Path(hit.where), _ENTRY_LIMIT_BYTES)
        return data if isinstance(data, Miss) else decode_golden(data)

    def put(self, entry: Entry, golden: Mapping[str, torch.Tensor] | None = None) -> Stored | NotStored:
        """Write `entry`, replacing one of the same key. NotStored where the disk refuses or `get` could not read it back."""
        try:
            path = entry_path(self.root, entry.region_key, entry.target, entry.contract)
            data = encode_entry(entry, golden)
        except (ProgramError, ValueError) as error:
            return NotStored(str(error))
        unread = decode_entry(data)
        return NotStored(f"would not read back: {unread.reason}") if isinstance(unread, Miss) else write_file(path, data)

    @contextlib.contextmanager
    def lock(self, key: str, target: Target, contract: Contract, *, timeout_s: float = 3600.0) -> Iterator[LockState]:
        """Exclude other searches of the same key: hold it around get, search and put, and `get` again once inside.

        On a folder that cannot hold a lock, or after `timeout_s`, the body runs all the same and the state says why it is not held.
        """
        with hold(entry_path(self.root, key, target, contract).with_suffix(".search.lock"), timeout_s) as state:
            yield state

    def put_alias(self, name: str, value: Mapping[str, Any], target: Target, contract: Contract) -> Stored | NotStored:
        """Remember a JSON object under `name` (a hex digest), such as the region keys of a Dynamo graph."""
        try:
            path = alias_path(self.root, name, target, contract)
            body = {"name": name, "family": target.family, "contract": contract.digest, "value": plain(value)}
            text = json.dumps({"body": body, "digest": digest_of(body)}, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            return NotStored(str(error))
        return write_file(path, text.encode())

    def get_alias(self, name: str, target: Target, contract: Contract) -> dict[str, Any] | Miss:
        """The object of `put_alias`, from the first folder that has a whole one. Raises ValueError for a bad name."""
        reasons: list[str] = []
        for root in (self.root, *self.read_only):
            path = alias_path(root, name, target, contract)
            found = _read_alias(path, root)
            if not isinstance(found, Miss):
                return found
            reasons += [] if found.reason == "absent" else [f"{path}: {found.reason}"]
        return Miss("; ".join(reasons) or "absent")

    def entries(self) -> Iterator[Found | Broken]:
        """Every entry file of every folder, the writable one first, in path order."""
        for root in (self.root, *self.read_only):
            for path in files_under(root / _VERSION, ".safetensors"):
                entry = _read_entry(path, root)
                yield Broken(path, entry.reason) if isinstance(entry, Miss) else Found(path, entry)

    def verify(self) -> tuple[Broken, ...]:
        """Read every file again, aliases too; the broken ones with their reasons (none: all is well)."""
        broken = [found for found in self.entries() if isinstance(found, Broken)]
        for root in (self.root, *self.read_only):
            aliases = ((path, _read_alias(path, root)) for path in files_under(root / _VERSION / "alias", ".json"))
            broken += [Broken(path, alias.reason) for path, alias in aliases if isinstance(alias, Miss)]
        return tuple(broken)

    def purge(self, match: Callable[[Entry], bool] | None = None) -> Purged:
        """Delete entries that `match`, unreadable files, and what killed writers left; None deletes all, aliases too.

        Only the writable folder is touched. An alias whose entry is gone is the reader's miss.
        """
        found = list(LocalCache(self.root).entries())
        doomed = [f.path for f in found if match is None or isinstance(f, Broken) or match(f.entry)]
        aliases = [
            path
            for path in files_under(self.root / _VERSION / "alias", ".json")
            if match is None or isinstance(_read_alias(path, self.root), Miss)
        ]
        failed: list[Broken] = []
        gone = tuple(path for path in doomed if _unlink(path, failed))
        gone_aliases = tuple(path for path in aliases if _unlink(path, failed))
        return Purged(gone, gone_aliases, remove_leftovers(self.root / _VERSION), tuple(failed))


def entry_path(root: Path, key: str, target: Target, contract: Contract) -> Path:
    """Where an entry lies. Raises ValueError for a key or family that is not a plain name (it would leave the folder)."""
    return root / _VERSION / _segment(target.family) / contract.digest / _checked(key)[:2] / f"{key}.safetensors"


def alias_path(root: Path, name: str, target: Target, contract: Contract) -> Path:
    """Where an alias lies. Raises ValueError like `entry_path`."""
    return root / _VERSION / "alias" / _segment(target.family) / contract.digest / _checked(name)[:2] / f"{name}.json"


def stale_reason(judged: Target, here: Target) -> str | None:
    """Why an entry judged on `judged` must be re-validated on `here`; None when nothing differs."""
    pairs = [(f.name, getattr(judged, f.name), getattr(here, f.name)) for f in fields(Target)]
    changes = [f"{name} {was or 'none'!r} -> {now or 'none'!r}" for name, was, now in pairs if was != now]
    return "judged elsewhere: " + ", ".join(changes) if changes else None


def _read_entry(path: Path, root: Path) -> Entry | Miss:
    data = read_file(path, _ENTRY_LIMIT_BYTES)
    entry = data if isinstance(data, Miss) else decode_entry(data)
    if isinstance(entry, Miss):
        return entry
    try:
        own = entry_path(root, entry.region_key, entry.target, entry.contract)
    except ValueError as error:
        return Miss(f"unreadable: {error}")
    return entry if own == path else Miss(f"unreadable: it holds the entry of {own.relative_to(root)}")


def _read_alias(path: Path, root: Path) -> dict[str, Any] | Miss:
    data = read_file(path, _ALIAS_LIMIT_BYTES)
    return data if isinstance(data, Miss) else decode_alias(data, path.relative_to(root / _VERSION / "alias").parts)


def decode_alias(data: bytes, place: tuple[str, ...]) -> dict[str, Any] | Miss:
    """The object in an alias file's bytes, if they belong where they lie: `place` is (family, contract, name[:2], file name)."""
    try:
        record = json.loads(data)
        body = record["body"]
        if record["digest"] != digest_of(body):
            return Miss("unreadable: digest differs")
        if place != (body["family"], body["contract"], body["name"][:2], f"{body['name']}.json"):
            return Miss(f"unreadable: it holds the alias {body['name']!r} of {body['family']}")
        value = unplain(body["value"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        return Miss(f"unreadable: {type(error).__name__}: {error}")
    return value if isinstance(value, dict) else Miss("unreadable: expected an object")


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"key {key!r}; expected the hex digits of a digest")
    return key


def _segment(name: str) -> str:
    if not _SEGMENT.fullmatch(name):
        raise ValueError(f"target family {name!r}; expected a plain name such as 'cuda-sm_90'")
    return name


def _unlink(path: Path, failed: list[Broken]) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        failed.append(Broken(path, f"{type(error).__name__}: {error}"))
        return False
    return True
