"""Where entries and decision records lie below a cache folder, made from keys and read back.

    v1/<family>/<contract digest>/<key[:2]>/<key>.safetensors     an entry
    v1/alias/<family>/<contract digest>/<name[:2]>/<name>.json    a decision record

Both directions are strict: a path is made of digests and plain names only, so no key, family or
listed file can lead out of the folder. It opens no file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from torch_cudal1.ir.records import Contract, Target

__all__ = [
    "ENTRY_LIMIT_BYTES",
    "RECORD_LIMIT_BYTES",
    "VERSION_FOLDER",
    "CachePath",
    "entry_path",
    "parse_cache_path",
    "record_path",
]

VERSION_FOLDER = "v1"
ENTRY_LIMIT_BYTES = 4 << 30
RECORD_LIMIT_BYTES = 64 << 20
# Hex digits only: a key comes from files and from the Hub, and must not hold "/" or "..".
_KEY = re.compile(r"[0-9a-f]{16,128}")
# No leading dot, so neither ".." nor a hidden folder; at most 100 characters, below the 255 bytes
# that file systems allow for a name.
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")
_CACHE_PATH = re.compile(
    r"v1/(?P<alias>alias/)?(?P<family>[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99})/(?P<contract>[0-9a-f]{12})"
    r"/(?P<start>[0-9a-f]{2})/(?P<name>[0-9a-f]{16,128})\.(?P<suffix>safetensors|json)"
)


@dataclass(frozen=True)
class CachePath:
    """What a file at a path of the cache must hold."""

    family: str
    contract: str
    # The region's key, or the decision record's name.
    name: str
    is_record: bool

    @property
    def limit_bytes(self) -> int:
        """The largest file that may lie there."""
        # A reader allocates at most this much, whatever size the file system or a manifest says.
        return RECORD_LIMIT_BYTES if self.is_record else ENTRY_LIMIT_BYTES


def parse_cache_path(path: str) -> CachePath | None:
    """`relative_path` read strictly: plain segments in a fixed order, so no other path, absolute or
    upwards, is one. None for all else.
    """
    match = _CACHE_PATH.fullmatch(path)
    if (
        # The pattern bounds each part on its own. The other two conditions tie parts together: a
        # file in the folder of another prefix, or of the other kind, would never be looked up.
        match is None
        or not match["name"].startswith(match["start"])
        or (match["suffix"] == "json") != bool(match["alias"])
    ):
        return None
    return CachePath(match["family"], match["contract"], match["name"], bool(match["alias"]))


def entry_path(root: Path, key: str, target: Target, contract: Contract) -> Path:
    """Where an entry lies. Raises ValueError for a key or family that is not a plain name (it would
    leave the folder).
    """
    return (
        root
        / VERSION_FOLDER
        / _check_segment(target.family)
        / contract.digest
        / _check_key(key)[:2]
        / f"{key}.safetensors"
    )


def record_path(root: Path, name: str, target: Target, contract: Contract) -> Path:
    """Where a decision record lies. Raises ValueError like `entry_path`."""
    return (
        root
        / VERSION_FOLDER
        / "alias"
        / _check_segment(target.family)
        / contract.digest
        / _check_key(name)[:2]
        / f"{name}.json"
    )


def _check_key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"key {key!r}; expected the hex digits of a digest")
    return key


def _check_segment(name: str) -> str:
    if not _SEGMENT.fullmatch(name):
        raise ValueError(f"target family {name!r}; expected a plain name such as 'cuda-sm_90'")
    return name
