"""Turns an `Entry` into the bytes of one `.safetensors` file, and such bytes back into the Entry.

The header carries one metadata key, "cudal1", with one canonical JSON text; the tensors are the
payloads (cubins as uint8, constants) and the golden vectors. A sha256 covers the text, and a digest
in the text covers each tensor. A file that is damaged, of another program or of another format is a
`Refusal`.

Signatures (`store.trust.signatures`) stand in the text beside the digest and sign it. A file needs
none, and adding or removing a signature changes no other byte of the text.

Parsing is by hand and strict, without a schema library: the bytes may be hostile, and a value of
the wrong type is refused, never converted.

It opens no file, decides nothing about freshness, and unpickles nothing. A digest finds damage; it
does not prove who wrote the file. `store.trust.trust_policy` decides whose signature counts and
whether it fits.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.program import Program, canonical_json, tensor_digest
from torch_cudal1.ir.records import Candidate, Contract, Entry, Target
from torch_cudal1.store.trust.signatures import Signature, Signer, add_signature, parse_signatures

__all__ = [
    "FORMAT",
    "METADATA_KEY",
    "DecodedEntry",
    "decode_entry",
    "decode_golden",
    "decode_plain",
    "digest_of",
    "encode_entry",
    "encode_plain",
    "open_entry",
    "sign_entry",
]

# Bump when a file of the old form can no longer be read.
FORMAT = 1
METADATA_KEY = "cudal1"
# Below the 100 MB at which safetensors itself refuses: this module parses the header with `json`
# before safetensors sees it.
HEADER_LIMIT_BYTES = 64 << 20
# Prefixes keep a payload and a golden vector of equal names apart.
_PAYLOAD, _GOLDEN = "payload.", "golden."
_PRECISIONS = get_args(get_type_hints(Contract)["precision"])
# JSON has no such numbers, and the error of a rejected candidate often is not finite.
_NOT_FINITE = (
    "inf",
    "-inf",
    "nan",
)
# What damaged or hostile bytes raise in json, safetensors and the records (RuntimeError: deep
# nesting, torch.device).
_DAMAGE = (
    SafetensorError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RuntimeError,
)


@dataclass(frozen=True)
class DecodedEntry:
    """A whole file: its Entry, the digest that all of it hangs on, and the signatures over that
    digest, not yet verified.
    """

    entry: Entry
    digest: str
    signatures: tuple[Signature, ...]


def encode_entry(entry: Entry, golden: Mapping[str, torch.Tensor] | None = None) -> bytes:
    """The file's bytes; equal content gives equal bytes. `golden`: named tensors kept for
    re-validation.

    Raises ProgramError when a payload cannot be stored as it is (not contiguous, dtype unknown to
    safetensors) or the evidence is not plain JSON.
    """
    golden = dict(golden or {})
    tensors = {
        _PAYLOAD + name: _make_storable(name, tensor)
        for name, tensor in entry.choice.program.all_payloads().items()
    }
    tensors |= {_GOLDEN + name: _make_storable(name, tensor) for name, tensor in golden.items()}
    try:
        body = _encode_entry(entry) | {
            "golden": {name: tensor_digest(golden[name]) for name in sorted(golden)}
        }
        # The digest covers the body without itself and without signatures, so that signing changes
        # neither the digest nor what revocation lists name.
        text = canonical_json(body | {"digest": digest_of(body)})
        # One metadata key with one text: two would make the bytes depend on hash order.
        return bytes(save(tensors, metadata={METADATA_KEY: text}))
    except (TypeError, ValueError, LookupError, SafetensorError) as error:
        raise ProgramError(
            "entry", f"cannot be written as a file: {type(error).__name__}: {error}"
        ) from error


def decode_entry(data: bytes) -> Entry | Refusal:
    """The Entry in `data`, payload tensors in fresh aligned memory; `Refusal("unreadable: ...")`
    for anything else.
    """
    opened = open_entry(data)
    return opened if isinstance(opened, Refusal) else opened.entry


def open_entry(data: bytes) -> DecodedEntry | Refusal:
    """`decode_entry`, with the digest and the signatures that `trust_policy.decide_standing` needs."""
    try:
        header, tensors = _open(data)
        return DecodedEntry(_decode_entry(header.body, tensors), header.digest, header.signatures)
    except _DAMAGE as error:
        return Refusal(f"unreadable: {type(error).__name__}: {error}")


def sign_entry(data: bytes, signer: Signer) -> bytes | Refusal:
    """The same file with `signer`'s signature, in place of an earlier one by the same key; a
    Refusal for what `open_entry` refuses.
    """
    opened = open_entry(data)
    if isinstance(opened, Refusal):
        return opened
    signatures = add_signature(opened.signatures, signer.sign("entry", opened.digest))
    text = canonical_json(
        {
            **_read_metadata(data).body,
            "digest": opened.digest,
            "signatures": [s.to_json() for s in signatures],
        }
    )
    # The tensors are saved from the bytes as they were read: only the text differs afterwards.
    return bytes(save(load(data), metadata={METADATA_KEY: text}))


def decode_golden(data: bytes) -> dict[str, torch.Tensor] | Refusal:
    """The golden vectors in `data` by name (may be none), or a Refusal like `decode_entry`."""
    try:
        header, tensors = _open(data)
        return {name: tensors[_GOLDEN + name] for name in header.body["golden"]}
    except _DAMAGE as error:
        return Refusal(f"unreadable: {type(error).__name__}: {error}")


def digest_of(value: object) -> str:
    """sha256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def encode_plain(value: Any) -> Any:
    """`value` as strict JSON: mappings and sequences rebuilt, inf and nan as {"float": "inf"}.
    Raises TypeError for objects.
    """
    if isinstance(value, Mapping):
        # `json` would turn the keys 1 and "1" into the same text, and the entry would read back
        # otherwise.
        if any(not isinstance(name, str) for name in value):
            raise TypeError(f"keys {list(value)!r}, expected strings")
        return {name: encode_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": float(value).hex()}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(f"{value!r} of type {type(value).__name__} is not plain JSON")


def decode_plain(value: Any) -> Any:
    """The inverse of `encode_plain`; sequences come back as lists."""
    if isinstance(value, list):
        return [decode_plain(item) for item in value]
    if isinstance(value, dict):
        # An object with further keys, or with another number, is the caller's own data.
        if len(value) == 1 and value.get("float") in _NOT_FINITE:
            return float(value["float"])
        return {name: decode_plain(item) for name, item in value.items()}
    return value


def _make_storable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ProgramError(
            "payload",
            f"{name!r} has strides {tensor.stride()}, which the file would lose; store it "
            f"contiguous",
        )
    # A clone owns its storage: safetensors refuses two tensors that share a storage.
    return tensor.detach().cpu().clone()


def _encode_entry(entry: Entry) -> dict[str, Any]:
    choice = entry.choice
    # Read for the exception only: an Entry whose evidence has no timing would fail when it is
    # shown.
    _ = entry.speedup
    return {
        "format": FORMAT,
        "package": entry.package,
        "created": entry.created,
        "region": {"key": entry.region_key, "name": entry.region_name},
        "target": asdict(entry.target),
        "contract": encode_plain(asdict(entry.contract)),
        "choice": {
            "program": choice.program.to_json(),
            "schedule": choice.schedule,
            "origin": choice.origin,
            "techniques": list(choice.techniques),
        },
        "evidence": encode_plain(entry.evidence),
        "tried": encode_plain(entry.tried),
    }


@dataclass(frozen=True)
class _Header:
    """The JSON text, taken apart: what the digest covers, and what stands beside it."""

    body: dict[str, Any]
    digest: str
    signatures: tuple[Signature, ...]


def _open(data: bytes) -> tuple[_Header, dict[str, torch.Tensor]]:
    header = _read_metadata(data)
    meta = header.body
    # Cloned, because tensors in the file start at unaligned offsets, and `decode_entry` promises
    # aligned memory.
    tensors = {name: tensor.clone() for name, tensor in load(data).items()}
    if meta["format"] != FORMAT:
        raise ValueError(f"format {meta['format']!r}, this version reads {FORMAT}")
    for name, digest in meta["golden"].items():
        # Payloads are compared in `Program.from_json`; golden vectors belong to no Program.
        if tensor_digest(tensors[_GOLDEN + name]) != digest:
            raise ValueError(f"digest of golden vector {name!r} differs")
    return header, tensors


def _read_metadata(data: bytes) -> _Header:
    # Read by hand before `safetensors.load`: the limit bounds what an unchecked length may
    # allocate.
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= size <= min(HEADER_LIMIT_BYTES, len(data) - 8):
        raise ValueError(
            f"{len(data)} bytes with a header of {size}, expected at most {HEADER_LIMIT_BYTES} "
            f"within the file"
        )
    metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    # Any further key would be bytes that no digest covers.
    if set(metadata) != {METADATA_KEY}:
        raise ValueError(
            f"metadata keys {sorted(metadata)}, expected only {METADATA_KEY!r}: not a file of "
            f"this package"
        )
    body = json.loads(metadata[METADATA_KEY])
    # Two spellings of one object would give two files with one digest, so only one is accepted.
    if not isinstance(body, dict) or canonical_json(body) != metadata[METADATA_KEY]:
        raise ValueError("metadata is not a canonical JSON object")
    # Taken out before the comparison: neither the digest nor a signature covers itself.
    digest, signatures = body.pop("digest", None), body.pop("signatures", None)
    if digest != digest_of(body):
        raise ValueError("digest of the metadata differs")
    return _Header(body, digest, () if signatures is None else parse_signatures(signatures))


def _decode_entry(meta: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Entry:
    payloads = {
        name.removeprefix(_PAYLOAD): tensor
        for name, tensor in tensors.items()
        if name.startswith(_PAYLOAD)
    }
    choice, region = meta["choice"], meta["region"]
    # `from_json` compares each payload with the digest that names it.
    program = Program.from_json(choice["program"], payloads)
    expected_names = {_PAYLOAD + name for name in program.all_payloads()} | {
        _GOLDEN + name for name in meta["golden"]
    }
    # A tensor that the text does not name is covered by no digest.
    if expected_names != set(tensors):
        raise ValueError(
            f"tensors {sorted(expected_names ^ set(tensors))} are not what the metadata names"
        )
    # The digests prove that the file is whole, not that its Program is safe to run.
    check_program(program)
    entry = Entry(
        region_key=_require_text(region["key"]),
        region_name=_require_text(region["name"]),
        target=Target(
            **{field.name: _require_text(meta["target"][field.name]) for field in fields(Target)}
        ),
        contract=_contract_from(meta["contract"]),
        choice=Candidate(
            program,
            choice["schedule"],
            _require_text(choice["origin"]),
            tuple(map(_require_text, choice["techniques"])),
        ),
        evidence=_require_mapping(decode_plain(meta["evidence"])),
        tried=tuple(map(_require_mapping, decode_plain(meta["tried"]))),
        created=_require_text(meta["created"]),
        package=_require_text(meta["package"]),
    )
    # Read for the exception only, as in `_encode_entry`: here it makes the file unreadable, a miss.
    _ = entry.speedup
    return entry


def _contract_from(data: Mapping[str, Any]) -> Contract:
    precision, finite, version = data["precision"], data["assume_finite"], data["version"]
    # `type(...) is`, because bool is an int in Python: `true` must not pass as a version.
    if precision not in _PRECISIONS or type(finite) is not bool or type(version) is not int:
        raise ValueError(f"unknown contract {data!r}")
    return Contract(precision, tuple(map(_require_text, data["rights"])), finite, version)


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r}, expected text")
    return value


def _require_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r}, expected an object")
    return value
