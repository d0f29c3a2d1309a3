"""How entries lie in a Hub repository: pure values and file names, no network and no disk.

    index.json                                    the targets, each with the digest of its index
    targets/<target>/index.json                   per contract: the shards, each with its digest
    targets/<target>/index/<contract>/<prefix>.json   a shard: what has a key with this prefix
    targets/<target>/v1/...                       an ordinary cache folder (`store.cache.local_cache`), one for each exact target

<target> is a digest over all fields of the `Target`: H100 and H200, or two versions of torch, do
not overwrite one another. A shard that outgrows `SPLIT_ROWS` becomes sixteen with a longer prefix,
so a look-up reads three small files however large the repository is, and nothing is ever listed.
File names are derived from digests; an index holds no path that could lead elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypeVar

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.program import canonical_json
from torch_cudal1.ir.records import Target
from torch_cudal1.store.cache.entry_file import digest_of

__all__ = [
    "INDEX_LIMIT_BYTES",
    "KIND_LABEL",
    "PULL_LOCK",
    "ROOT_INDEX",
    "FileListing",
    "Kind",
    "Root",
    "Shard",
    "TargetIndex",
    "repository_file",
    "shard_file",
    "sort_by_closeness",
    "target_folder",
    "target_id",
    "target_index_file",
]

# Bump when an index of the old form can no longer be read.
FORMAT = 1
ROOT_INDEX = "index.json"
# A lock file beside the commits on a disk. A pull holds it while a commit has files and no pin yet,
# and a purge takes it before it deletes one.
PULL_LOCK = "pull.lock"
INDEX_LIMIT_BYTES = 16 << 20
FILE_LIMIT_BYTES = 1 << 30
# Rows of a shard before it is split, about 100 kB of JSON: what one look-up downloads.
SPLIT_ROWS = 512
_LONGEST_PREFIX = 4
_DIGEST, _TARGET, _CONTRACT = (
    re.compile(r"[0-9a-f]{64}"),
    re.compile(r"[0-9a-f]{16}"),
    re.compile(r"[0-9a-f]{12}"),
)
_KEY, _PREFIX = re.compile(r"[0-9a-f]{16,128}"), re.compile(r"[0-9a-f]{0,4}")
# Powers of two: a difference in one field outweighs differences in all fields after it.
_WEIGHTS = {
    "sku": 8,
    "torch": 4,
    "triton": 2,
    "driver": 1,
}
_FAMILY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")
_SUFFIX = {"entry": ".safetensors", "alias": ".json"}
Kind: TypeAlias = Literal["entry", "alias"]
KIND_LABEL: Mapping[Kind, str] = {"entry": "entry", "alias": "decision record"}
_T = TypeVar("_T")


@dataclass(frozen=True)
class FileListing:
    """What an index says about a file: its sha256, its size, and for entries when they were made
    (ISO 8601, UTC).
    """

    sha256: str
    size_bytes: int
    created: str = ""

    @classmethod
    def from_json(cls, data: Any) -> FileListing:
        """Raises ValueError, TypeError or LookupError for anything that is not one."""
        size = data["size"]
        # The size bounds the download, so it is checked where it enters.
        if type(size) is not int or not 0 < size <= FILE_LIMIT_BYTES:
            raise ValueError(f"size {size!r}, expected 1 to {FILE_LIMIT_BYTES} bytes")
        if not isinstance(data["created"], str) or len(data["created"]) > 40:
            raise ValueError(f"created {data['created']!r}, expected a time")
        return cls(_match(_DIGEST, data["sha256"], "a sha256"), size, data["created"])

    def to_json(self) -> dict[str, Any]:
        """The inverse of `from_json`."""
        return {"sha256": self.sha256, "size": self.size_bytes, "created": self.created}


@dataclass(frozen=True)
class Root:
    """The targets of a repository by their id."""

    targets: Mapping[str, tuple[Target, FileListing]] = field(default_factory=dict)

    @classmethod
    def read(cls, data: bytes) -> Root | Refusal:
        """The root index in `data`, or which rule it breaks."""

        def parse(body: Any) -> Root:
            targets = {}
            for name, row in body["targets"].items():
                target = Target(
                    **{f.name: _require_text(row["target"][f.name]) for f in fields(Target)}
                )
                # Otherwise entries of one machine could be offered as those of another.
                if name != target_id(target):
                    raise ValueError(
                        f"target {name!r} is named after another target than {target.sku!r} with "
                        f"torch {target.torch}"
                    )
                # The family becomes a folder's name on this disk.
                _match(_FAMILY, target.family, "a plain name such as 'cuda-sm_90'")
                targets[name] = (target, FileListing.from_json(row["index"]))
            return cls(targets)

        return _read(data, parse)

    def write(self) -> bytes:
        """Its file; equal content gives equal bytes."""
        rows = {
            name: {"target": asdict(target), "index": listed.to_json()}
            for name, (target, listed) in self.targets.items()
        }
        return _write({"targets": rows})


@dataclass(frozen=True)
class TargetIndex:
    """The shards of one target: contract digest -> prefix -> file."""

    shards: Mapping[str, Mapping[str, FileListing]] = field(default_factory=dict)

    @classmethod
    def read(cls, data: bytes) -> TargetIndex | Refusal:
        """The index of a target in `data`, or which rule it breaks."""

        def parse(body: Any) -> TargetIndex:
            return cls(
                {
                    _match(_CONTRACT, contract, "a contract's digest"): {
                        _match(_PREFIX, prefix, "a prefix of keys"): FileListing.from_json(row)
                        for prefix, row in shards.items()
                    }
                    for contract, shards in body["contracts"].items()
                }
            )

        return _read(data, parse)

    def write(self) -> bytes:
        """Its file."""
        rows = {
            c: {prefix: listed.to_json() for prefix, listed in shards.items()}
            for c, shards in self.shards.items()
        }
        return _write({"contracts": rows})

    def find_shard_prefix(self, contract: str, key: str) -> str | None:
        """The prefix of the shard that holds `key` if any does, the longest one; None when no shard
        can hold it.
        """
        shards = self.shards.get(contract, {})
        return next((key[:n] for n in range(_LONGEST_PREFIX, -1, -1) if key[:n] in shards), None)


@dataclass(frozen=True)
class Shard:
    """Entries by region key and decision records by name, with their files."""

    entries: Mapping[str, FileListing] = field(default_factory=dict)
    records: Mapping[str, FileListing] = field(default_factory=dict)

    @classmethod
    def read(cls, data: bytes) -> Shard | Refusal:
        """The shard in `data`, or which rule it breaks."""

        def parse_rows(part: Any) -> dict[str, FileListing]:
            return {
                _match(_KEY, key, "the hex digits of a key"): FileListing.from_json(row)
                for key, row in part.items()
            }

        return _read(
            data, lambda body: cls(parse_rows(body["entries"]), parse_rows(body["aliases"]))
        )

    def write(self) -> bytes:
        """Its file."""
        parts = {"entries": self.entries, "aliases": self.records}
        return _write(
            {
                part: {key: row.to_json() for key, row in rows.items()}
                for part, rows in parts.items()
            }
        )

    def split(self, prefix: str) -> dict[str, Shard]:
        """Itself under `prefix`, or in sixteen parts (and those again) once it is over
        `SPLIT_ROWS`; empty parts are left out.
        """
        if len(self.entries) + len(self.records) <= SPLIT_ROWS or len(prefix) == _LONGEST_PREFIX:
            return {prefix: self}
        shards: dict[str, Shard] = {}
        for longer_prefix in (prefix + digit for digit in "0123456789abcdef"):
            # Rows keep their full keys, so a shard is read alone, whatever its prefix.
            entries = {
                key: row for key, row in self.entries.items() if key.startswith(longer_prefix)
            }
            records = {
                key: row for key, row in self.records.items() if key.startswith(longer_prefix)
            }
            shards |= Shard(entries, records).split(longer_prefix) if entries or records else {}
        return shards


def target_id(target: Target) -> str:
    """The name of a target's folder: 16 hex digits over all its fields."""
    # All fields, so that H100 and H200, or two versions of torch, do not overwrite one another.
    return digest_of(asdict(target))[:16]


def target_folder(name: str) -> str:
    """The folder of a target in the repository."""
    return f"targets/{_match(_TARGET, name, 'the id of a target')}"


def target_index_file(name: str) -> str:
    """Where the index of a target lies in the repository."""
    return f"{target_folder(name)}/index.json"


def shard_file(name: str, contract: str, prefix: str) -> str:
    """Where a shard lies in the repository."""
    return f"{target_folder(name)}/index/{contract}/{prefix or 'all'}.json"


def repository_file(kind: Kind, key: str, target: Target, contract: str) -> str:
    """Where an entry or decision record lies in the repository, by its contract's digest. Raises
    ValueError for what is no digest.
    """
    _match(_KEY, key, "the hex digits of a key")
    _match(_CONTRACT, contract, "a contract's digest")
    family = target.family if kind == "entry" else f"alias/{target.family}"
    return (
        f"{target_folder(target_id(target))}/v1/{family}/{contract}/{key[:2]}/{key}{_SUFFIX[kind]}"
    )


def sort_by_closeness(root: Root, machine: Target) -> list[tuple[str, Target]]:
    """The targets of this machine's family, the one with the fewest and least weighty differences
    first.
    """

    def measure_distance(target: Target) -> int:
        return sum(
            weight
            for name, weight in _WEIGHTS.items()
            if getattr(target, name) != getattr(machine, name)
        )

    same_family = [
        (name, target)
        for name, (target, _) in root.targets.items()
        if target.family == machine.family
    ]
    # The id second, so that all processes ask in the same order.
    return sorted(same_family, key=lambda item: (measure_distance(item[1]), item[0]))


def _read(data: bytes, parse: Callable[[Any], _T]) -> _T | Refusal:
    try:
        body = json.loads(data)
        if body["format"] != FORMAT:
            return Refusal(f"index format {body['format']!r}, this version reads {FORMAT}")
        return parse(body)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # An index comes from the network: whatever is wrong with it is a refusal, and no crash of a
        # start.
        return Refusal(f"not an index of this package: {type(error).__name__}: {error}")


def _write(body: Mapping[str, Any]) -> bytes:
    # Canonical: equal content gives equal bytes and digests, so that an unchanged index is not
    # committed again.
    return canonical_json({"format": FORMAT, **body}).encode()


def _match(pattern: re.Pattern[str], text: Any, expected: str) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ValueError(f"{text!r}, expected {expected}")
    return text


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r}, expected text")
    return value
