"""Bundles for tests: whole ones from a cache, and crafted ones in which exactly one thing is wrong."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.store.conftest import CONTRACT, HERE, make_entry
from torch_cudal1.ir.program import canonical_json
from torch_cudal1.ir.records import Target
from torch_cudal1.store.bundle.bundle_file import FORMAT, METADATA_KEY, write_bundle
from torch_cudal1.store.cache.cache_paths import entry_path, record_path
from torch_cudal1.store.cache.decision_record import encode_record
from torch_cudal1.store.cache.entry_file import encode_entry
from torch_cudal1.store.cache.inventory import take_inventory
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.trust.signatures import create_key, load_signer
from torch_cudal1.store.trust.trust_policy import Rules

KEY, OTHER_KEY, NAME = "ab" * 32, "ef" * 32, "cd" * 32
GPU = Target("cuda", "sm_90", "NVIDIA H200", "580.1", "2.13.0", "3.7.1")
ENTRY = encode_entry(make_entry())
RECORD = encode_record(
    NAME, {"winner": "cudal1", "candidates": [make_entry().choice.digest]}, HERE, CONTRACT
)
ENTRY_NAME = "0/" + entry_path(Path(), KEY, HERE, CONTRACT).as_posix()
RECORD_NAME = "0/" + record_path(Path(), NAME, HERE, CONTRACT).as_posix()


def fill_cache(root: Path) -> LocalCache:
    """A cache with entries for two families and a decision record."""
    cache = LocalCache(root)
    cache.put(make_entry())
    cache.put(make_entry(region_key=OTHER_KEY, region_name="block.1"))
    cache.put(make_entry(target=GPU))
    cache.put_decision_record(
        NAME, {"winner": "cudal1", "candidates": [make_entry().choice.digest]}, HERE, CONTRACT
    )
    return cache


def bundle_of(cache: LocalCache, path: Path) -> Path:
    """Everything in `cache` as a bundle."""
    write_bundle(path, take_inventory(cache))
    return path


def sign_caches(key: Path, *caches: LocalCache) -> Rules:
    """Sign everything in `caches` with a new key, and the rules under which that counts."""
    public = create_key("team", key, keep_out_of=())
    for cache in caches:
        assert not cache.sign(load_signer(key, keep_out_of=())).failed
    publishers = key.with_suffix(".toml")
    publishers.write_text(f'[[publisher]]\nname = "team"\nkey = "{public}"\n')
    publishers.chmod(0o600)
    return Rules("signed", publishers)


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def craft_bundle(
    path: Path, files: Sequence[tuple[Any, Any, Any]], payload: bytes, **changes: Any
) -> Path:
    """A bundle whose header is exactly the one its manifest gives: `files` are (name, size, sha256)
    and may lie.
    """
    body = {
        "format": FORMAT,
        "files": [list(record) for record in files],
        **changes.pop("body", {}),
    }
    record: dict[str, Any] = {"__metadata__": {METADATA_KEY: canonical_json(body)}}
    start = 0
    for name, size, _ in files:
        end = start + (size if type(size) is int else 0)
        record[str(name)] = {"dtype": "U8", "shape": [size], "data_offsets": [start, end]}
        start = end
    text = canonical_json({**record, **changes}).encode()
    return frame_file(path, text, payload)


def frame_file(path: Path, header: bytes, payload: bytes = b"") -> Path:
    """A file in the safetensors frame with this header."""
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)
    return path


def of(*files: tuple[str, bytes]) -> tuple[list[tuple[str, int, str]], bytes]:
    """Honest records and their payload, in order of name."""
    ordered = sorted(files)
    return [(name, len(content), sha(content)) for name, content in ordered], b"".join(
        content for _, content in ordered
    )


def name_entry(target: Target = HERE, **changes: Any) -> str:
    """The name under which the sample entry would lie for another key, family or contract."""
    key, contract = changes.pop("key", KEY), dataclasses.replace(CONTRACT, **changes)
    return "0/" + entry_path(Path(), key, target, contract).as_posix()
