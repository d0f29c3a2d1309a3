"""A decision record as one JSON file, and back: a small record that leads to entries, such as the
region keys of a captured graph.

    {"body": {"name", "family", "contract", "value"}, "digest": sha256 of the canonical JSON of body, "signatures": [...]}

The body says where the file belongs; one that lies elsewhere, is damaged or holds anything more is
a `Refusal`. Signatures are optional and stand beside the digest, as in an entry. It opens no file
and verifies no signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import Contract, Target
from torch_cudal1.store.cache.entry_file import decode_plain, digest_of, encode_plain
from torch_cudal1.store.trust.signatures import Signature, Signer, add_signature, parse_signatures

__all__ = [
    "DecisionRecord",
    "call_name",
    "decode_record",
    "encode_record",
    "open_record",
    "sign_record",
]


@dataclass(frozen=True)
class DecisionRecord:
    """A whole file: its object, the digest of its body, and the signatures over that, not yet
    verified.
    """

    value: dict[str, Any]
    digest: str
    signatures: tuple[Signature, ...]


def encode_record(name: str, value: Mapping[str, Any], target: Target, contract: Contract) -> bytes:
    """The file's bytes. Raises TypeError or ValueError for a value that is not plain JSON."""
    body = {
        "name": name,
        "family": target.family,
        "contract": contract.digest,
        "value": encode_plain(value),
    }
    return _encode({"body": body, "digest": digest_of(body)})


def open_record(data: bytes, segments: tuple[str, ...]) -> DecisionRecord | Refusal:
    """What is in the bytes, if they belong where they lie: `segments` is (family, contract,
    name[:2], file name).
    """
    try:
        record = json.loads(data)
        body = record["body"]
        if record["digest"] != digest_of(body):
            return Refusal("unreadable: digest differs")
        # A record copied under another name would lead a graph to regions that are not its own.
        if segments != (body["family"], body["contract"], body["name"][:2], f"{body['name']}.json"):
            return Refusal(
                f"unreadable: it holds the decision record {body['name']!r} of {body['family']}"
            )
        # The digest covers the body only: anything more would be bytes that no check sees.
        if not set(record) <= {"body", "digest", "signatures"}:
            return Refusal(
                f"unreadable: it holds {sorted(record)}; expected body, digest and perhaps "
                f"signatures"
            )
        signatures = parse_signatures(record["signatures"]) if "signatures" in record else ()
        value = decode_plain(body["value"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        return Refusal(f"unreadable: {type(error).__name__}: {error}")
    return (
        DecisionRecord(value, record["digest"], signatures)
        if isinstance(value, dict)
        else Refusal("unreadable: expected an object")
    )


def decode_record(data: bytes, segments: tuple[str, ...]) -> dict[str, Any] | Refusal:
    """The object in the bytes, with any signature or none, if they belong at `segments`."""
    opened = open_record(data, segments)
    return opened if isinstance(opened, Refusal) else opened.value


def call_name(keys: Iterable[str]) -> str:
    """The name under which is remembered how the whole call of a model with these regions, in
    order, was measured.
    """
    # The words keep the name apart from that of a graph's record, which lies in the same folder.
    return hashlib.sha256("|".join(["end to end", *keys]).encode()).hexdigest()


def sign_record(data: bytes, segments: tuple[str, ...], signer: Signer) -> bytes | Refusal:
    """The same file with `signer`'s signature, in place of an earlier one by the same key; a
    Refusal for what `open_record` refuses.
    """
    opened = open_record(data, segments)
    if isinstance(opened, Refusal):
        return opened
    # "alias" is the stored name of a decision record. It is part of what is signed, so existing
    # signatures fix it.
    signatures = add_signature(opened.signatures, signer.sign("alias", opened.digest))
    return _encode(
        {**json.loads(data), "signatures": [signature.to_json() for signature in signatures]}
    )


def _encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, allow_nan=False).encode()
