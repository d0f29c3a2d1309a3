"""One file with entries and decision records for many machines: written whole or not at all, and
read with suspicion.

The container is a safetensors file: one uint8 tensor a file, uncompressed, and a manifest
(`cudal1-bundle` in the metadata) with the size and sha256 of each. A name in it is
`<layer>/<path>`: files that several device models of one architecture have at the same path lie in
different layers. Any safetensors library can list a bundle. This module reads the bytes itself,
because the header must be, byte for byte, the header that its own manifest gives. So there is one
way to read a bundle: no duplicate names, no overlap, no gaps, no links, no compression, nothing
after the end. It does not know what the files hold (`imported` checks that).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from torch_cudal1.core.errors import SupplyError
from torch_cudal1.ir.program import canonical_json
from torch_cudal1.store.cache.cache_paths import parse_cache_path
from torch_cudal1.store.cache.entry_file import digest_of
from torch_cudal1.store.cache.files import write_atomically
from torch_cudal1.store.cache.inventory import CacheFile, Inventory

__all__ = ["Bundle", "Manifest", "Member", "open_bundle", "write_bundle"]

METADATA_KEY = "cudal1-bundle"
FORMAT = 1
FILES_LIMIT = 100_000
LAYERS_LIMIT = 100
HEADER_LIMIT_BYTES = 64 << 20
TOTAL_LIMIT_BYTES = 64 << 30
# Commas, brackets or braces that one file needs in the header. A header with more than this many a
# file is made to take memory when it is parsed.
_TOKENS_PER_FILE = 12
_LAYERED = re.compile(r"(?P<layer>\d|[1-9]\d)/(?P<path>.+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Member:
    """A file of a bundle."""

    layer: int
    relative_path: str
    size_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """Its path below the folder of an imported bundle."""
        return f"{self.layer}/{self.relative_path}"


@dataclass(frozen=True)
class Manifest:
    """What a bundle holds, in order of name."""

    members: tuple[Member, ...]

    @cached_property
    def digest(self) -> str:
        """sha256 over names, sizes and digests: equal content is an equal bundle."""
        return digest_of(self._encode_body())

    @property
    def size_bytes(self) -> int:
        """All members together."""
        return sum(member.size_bytes for member in self.members)

    @property
    def families(self) -> tuple[str, ...]:
        """Target families, such as "cuda-sm_90"."""
        families = {
            cache_path.family
            for member in self.members
            if (cache_path := parse_cache_path(member.relative_path))
        }
        return tuple(sorted(families))

    def encode_header(self) -> bytes:
        """The header's bytes, as safetensors wants them: JSON padded with spaces to eight bytes."""
        record: dict[str, Any] = {
            "__metadata__": {METADATA_KEY: canonical_json(self._encode_body())}
        }
        start = 0
        for member in self.members:
            record[member.name] = {
                "dtype": "U8",
                "shape": [member.size_bytes],
                "data_offsets": [start, start + member.size_bytes],
            }
            start += member.size_bytes
        text = canonical_json(record).encode()
        # The format wants the tensor data aligned to eight bytes, and allows spaces only.
        return text + b" " * (-len(text) % 8)

    def _encode_body(self) -> dict[str, Any]:
        return {"format": FORMAT, "files": [[m.name, m.size_bytes, m.sha256] for m in self.members]}


@dataclass(frozen=True)
class Bundle:
    """An open bundle whose manifest was checked against the file's size; the members' bytes are
    checked as they are read.
    """

    path: Path
    manifest: Manifest
    _file: BinaryIO
    _start: int

    def iter_files(self) -> Iterator[tuple[Member, bytes]]:
        """Every member with its bytes, one at a time. Raises SupplyError where they are not what
        the manifest says.
        """
        offset = self._start
        for member in self.manifest.members:
            self._file.seek(offset)
            data = self._file.read(member.size_bytes)
            offset += member.size_bytes
            # The file's size was checked at opening, but another process may truncate it meanwhile.
            if len(data) != member.size_bytes:
                raise SupplyError(
                    self.path,
                    "size",
                    f"{member.name} ends after {len(data)} of {member.size_bytes} bytes",
                )
            if (actual := hashlib.sha256(data).hexdigest()) != member.sha256:
                raise SupplyError(
                    self.path,
                    "digest",
                    f"{member.name} has sha256 {actual}, the manifest says {member.sha256}",
                )
            yield member, data


@contextlib.contextmanager
def open_bundle(path: Path) -> Iterator[Bundle]:
    """Open and check `path`. Raises SupplyError for anything that is not a whole bundle, OSError
    where the file cannot be read.
    """
    # O_NONBLOCK: opening a named pipe without it waits for a writer, perhaps for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        # Read from the open descriptor: the path may be exchanged after a `stat`. A pipe or a device
        # has no size that the manifest could be compared with.
        if not stat.S_ISREG(status.st_mode):
            raise SupplyError(
                path, "form", "it is no regular file; expected a bundle of `cudal1 export`"
            )
        length = int.from_bytes(file.read(8), "little")
        # The length is checked against the file before it is read: a header can not claim more
        # memory than the file has.
        if status.st_size < 8 or not 2 <= length <= min(HEADER_LIMIT_BYTES, status.st_size - 8):
            came = f"{status.st_size} bytes with a header of {length}, expected at most {HEADER_LIMIT_BYTES} within the file"
            raise SupplyError(
                path, "form", f"{came}; it is truncated, or not a bundle of `cudal1 export`"
            )
        manifest = _parse_manifest(path, file.read(length))
        expected = 8 + length + manifest.size_bytes
        # Nothing may follow the last member: such bytes would be covered by no digest.
        if status.st_size != expected:
            raise SupplyError(
                path,
                "size",
                f"{status.st_size} bytes, its manifest announces {expected}; copy the file again",
            )
        yield Bundle(path, manifest, file, 8 + length)


def write_bundle(path: Path, inventory: Inventory) -> Manifest:
    """Write everything in `inventory` as one file, in one step; equal content gives equal bytes.

    Raises SupplyError when `path` holds something else than a bundle, a file changes meanwhile, or
    the disk refuses.
    """
    if path.exists():
        # A mistyped path must not cost a user's file: only a bundle is replaced.
        with open_bundle(path):
            pass
    sources = _assign_layers((*inventory.entries, *inventory.records))
    manifest = Manifest(tuple(member for member, _ in sources))
    layers = max((member.layer for member in manifest.members), default=-1) + 1
    if (
        len(sources) > FILES_LIMIT
        or manifest.size_bytes > TOTAL_LIMIT_BYTES
        or layers > LAYERS_LIMIT
    ):
        came = f"{len(sources)} files of {manifest.size_bytes} bytes in {layers} layers"
        came += f", expected at most {FILES_LIMIT} of {TOTAL_LIMIT_BYTES} in {LAYERS_LIMIT}"
        raise SupplyError(path, "count", f"{came}; export fewer keys or families at a time")
    # A full disk keeps the old bundle and leaves nothing else.
    with write_atomically(path) as file:
        _fill(file, path, manifest, [file.path for _, file in sources])
    return manifest


def _fill(file: BinaryIO, path: Path, manifest: Manifest, sources: Sequence[Path]) -> None:
    header = manifest.encode_header()
    file.write(len(header).to_bytes(8, "little") + header)
    for member, source in zip(manifest.members, sources, strict=True):
        digest = hashlib.sha256()
        with open(source, "rb") as read:
            # In chunks: an entry may have 4 GiB.
            while chunk := read.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
        # The manifest is written first, so a source that a search replaces meanwhile would make a
        # bundle that no import accepts.
        if digest.hexdigest() != member.sha256:
            raise SupplyError(
                path, "digest", f"{source} changed while it was exported; run the command again"
            )


def _assign_layers(files: Sequence[CacheFile]) -> list[tuple[Member, CacheFile]]:
    """Files of the same path in layers of their own, in the order given; sorted by name, which is
    the order in the file.
    """
    layers: dict[str, int] = {}
    layered = []
    for file in files:
        layer = layers[file.relative_path] = layers.get(file.relative_path, -1) + 1
        layered.append((Member(layer, file.relative_path, file.size_bytes, file.sha256), file))
    # Sorted by name, so that equal content gives equal bytes.
    return sorted(layered, key=lambda pair: pair[0].name)


def _parse_manifest(path: Path, header: bytes) -> Manifest:
    """The manifest in a header. The counts bound the memory that parsing may take before anything
    in it is believed.
    """
    most = _TOKENS_PER_FILE * FILES_LIMIT
    # The manifest is JSON inside a JSON string: spelled as escapes, its commas and braces would
    # hide from the count below. Names and digests are plain ASCII and need none.
    if b"\\u" in header:
        raise SupplyError(
            path, "form", "its header holds escapes, which no bundle of `cudal1 export` needs"
        )
    # Counted before parsing: nothing in the header is believed yet, and parsing takes memory.
    if max(header.count(token) for token in (b",", b"[", b"{")) > most:
        raise SupplyError(
            path,
            "count",
            f"its header lists more than {FILES_LIMIT} files; expected a bundle of `cudal1 export`",
        )
    try:
        body = json.loads(json.loads(header)["__metadata__"][METADATA_KEY])
        if body["format"] != FORMAT:
            raise SupplyError(
                path, "format", f"format {body['format']!r}, this version reads {FORMAT}"
            )
        members = tuple(_parse_member(path, *record) for record in body["files"])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if isinstance(error, SupplyError):
            raise
        raise SupplyError(
            path, "form", f"not a bundle of `cudal1 export`: {type(error).__name__}: {error}"
        ) from error
    names = [member.name for member in members]
    if len(names) > FILES_LIMIT or names != sorted(set(names)):
        raise SupplyError(
            path,
            "names",
            f"its {len(names)} names are not unique and in order, or more than {FILES_LIMIT}",
        )
    manifest = Manifest(members)
    if manifest.size_bytes > TOTAL_LIMIT_BYTES:
        raise SupplyError(
            path,
            "size",
            f"it announces {manifest.size_bytes} bytes, expected at most {TOTAL_LIMIT_BYTES}",
        )
    # There is one header for a manifest: duplicates, gaps, overlaps and other keys are excluded.
    if manifest.encode_header() != header:
        raise SupplyError(
            path,
            "form",
            "its header is not the one that its manifest gives; something was added or changed",
        )
    return manifest


def _parse_member(path: Path, name: Any, size: Any, sha256: Any) -> Member:
    if not (
        isinstance(name, str)
        and isinstance(sha256, str)
        # Not `isinstance`: `true` is an int in Python.
        and type(size) is int
        and _SHA256.fullmatch(sha256)
    ):
        raise SupplyError(
            path, "form", f"record {[name, size, sha256]!r}; expected a name, a size and a sha256"
        )
    match = _LAYERED.fullmatch(name)
    # The name becomes a path at import. Only those of entries and records pass: no "..", no
    # absolute path.
    cache_path = parse_cache_path(match["path"]) if match else None
    if match is None or cache_path is None:
        raise SupplyError(
            path,
            "names",
            f"{name!r} is no path of an entry or decision record; nothing else may be in a bundle",
        )
    # A member is read whole into memory, so its size is bounded before.
    if not 0 < size <= cache_path.limit_bytes:
        raise SupplyError(
            path, "size", f"{name} announces {size} bytes, expected 1 to {cache_path.limit_bytes}"
        )
    return Member(int(match["layer"]), match["path"], size, sha256)
