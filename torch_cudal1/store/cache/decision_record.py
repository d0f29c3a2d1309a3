"""An alias as one JSON file, and back: a small record that leads to entries, such as the region
keys of a captured graph.

    {"body": {"name", "family", "contract", "value"}, "digest": sha256 of the canonical JSON of body, "signatures": [...]}

The body says where the file belongs; one that lies elsewhere, is damaged or holds anything more is
a `Miss`. Signatures are optional and stand beside the digest, as in an entry. It opens no file and
verifies no signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_cudal1.ir.records import Contract, Miss, Target
from torch_cudal1.store.cache.entry_file import digest_of, plain, unplain
from torch_cudal1.store.trust.signatures import Signature, Signer, signatures_from, with_signature

__all__ = ["Alias", "call_name", "decode_alias", "encode_alias", "open_alias", "sign_alias"]


@dataclass(frozen=True)
class Alias:
    """A whole file: its object, the digest of its body, and the signatures over that, not yet
    verified.
    """

    value: dict[str, Any]
    digest: str
    signatures: tuple[Signature, ...]


def encode_alias(name: str, value: Mapping[str, Any], target: Target, contract: Contract) -> bytes:
    """The file's bytes. Raises TypeError or ValueError for a value that is not plain JSON."""
    body = {
        "name": name,
        "family": target.family,
        "contract": contract.digest,
        "value": plain(value),
    }
    return _encoded({"body": body, "digest": digest_of(body)})


def open_alias(data: bytes, place: tuple[str, ...]) -> Alias | Miss:
    """What is in the bytes, if they belong where they lie: `place` is (family, contract, name[:2],
    file name).
    """
    try:
        record = json.loads(data)
        body = record["body"]
        if record["digest"] != digest_of(body):
            return Miss("unreadable: digest differs")
        if place != (body["family"], body["contract"], body["name"][:2], f"{body['name']}.json"):
            return Miss(f"unreadable: it holds the alias {body['name']!r} of {body['family']}")
        if not set(record) <= {"body", "digest", "signatures"}:
            return Miss(
                f"unreadable: it holds {sorted(record)}; expected body, digest and perhaps signatures"
            )
        signatures = signatures_from(record["signatures"]) if "signatures" in record else ()
        value = unplain(body["value"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        return Miss(f"unreadable: {type(error).__name__}: {error}")
    return (
        Alias(value, record["digest"], signatures)
        if isinstance(value, dict)
        else Miss("unreadable: expected an object")
    )


def decode_alias(data: bytes, place: tuple[str, ...]) -> dict[str, Any] | Miss:
    """The object in the bytes, whoever signed it, if they belong at `place`."""
    opened = open_alias(data, place)
    return opened if isinstance(opened, Miss) else opened.value


def call_name(keys: Iterable[str]) -> str:
    """The name under which is remembered how the whole call of a model with these regions, in
    order, was measured.
    """
    return hashlib.sha256("|".join(["end to end", *keys]).encode()).hexdigest()


def sign_alias(data: bytes, place: tuple[str, ...], signer: Signer) -> bytes | Miss:
    """The same file with `signer`'s signature, in place of an earlier one by the same key; a Miss
    for what `open_alias` refuses.
    """
    opened = open_alias(data, place)
    if isinstance(opened, Miss):
        return opened
    signatures = with_signature(opened.signatures, signer.sign("alias", opened.digest))
    return _encoded(
        {**json.loads(data), "signatures": [signature.to_json() for signature in signatures]}
    )


def _encoded(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, allow_nan=False).encode()
