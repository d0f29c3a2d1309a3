"""Keys and lists for tests, and files altered as an attacker would: metadata changed, with or
without a digest that fits again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

from torch_cudal1.ir.program import canonical_json
from torch_cudal1.store.cache.entry_file import METADATA_KEY, digest_of
from torch_cudal1.store.trust.signatures import Signer, create_key, load_signer


def make_signer(folder: Path, name: str = "team") -> Signer:
    """A fresh key in `folder`."""
    create_key(name, folder / "keys" / f"{name}.pem", keep_out_of=())
    return load_signer(folder / "keys" / f"{name}.pem", keep_out_of=())


def allow(path: Path, **publishers: str) -> Path:
    """A list of publishers at `path`: public keys by name."""
    path.write_text(
        "".join(
            f'[[publisher]]\nname = "{name}"\nkey = "{key}"\n' for name, key in publishers.items()
        )
    )
    return path


def write_revocations(path: Path, **digests: str) -> Path:
    """A revocation list at `path`: one record a kind."""
    path.write_text(
        "".join(
            f'[[revoked]]\n{kind} = "{value}"\nreason = "found wrong"\n'
            for kind, value in digests.items()
        )
    )
    return path


def change_metadata(
    entry_bytes: bytes, change: Callable[[dict[str, Any]], object], *, digest_fits: bool = False
) -> bytes:
    """An entry file with its metadata changed."""
    size = int.from_bytes(entry_bytes[:8], "little")
    meta = json.loads(json.loads(entry_bytes[8 : 8 + size])["__metadata__"][METADATA_KEY])
    change(meta)
    if digest_fits:
        meta["digest"] = digest_of(
            {name: value for name, value in meta.items() if name not in ("digest", "signatures")}
        )
    return bytes(save(load(entry_bytes), metadata={METADATA_KEY: canonical_json(meta)}))
