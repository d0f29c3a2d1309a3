"""Ed25519 signatures over the digest of an entry or decision record: keys made, read and used. RFC
8032, by the library `cryptography`.

A signature covers the kind of record and its digest, and the digest covers region, target,
contract, Program, payloads and evidence: a signature says nothing about any other file. Private
keys are files of mode 0600 in PKCS #8 PEM, never inside a cache.

It does not decide whose signature counts (`trust_policy` does). The library is imported when a key
is first used: without it no record can be signed, and verifying any signature is a `Refusal` with
that reason.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.refusal import Refusal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = [
    "KEY_PREFIX",
    "LIBRARY_MISSING",
    "Kind",
    "Signature",
    "Signer",
    "add_signature",
    "create_key",
    "load_signer",
    "parse_public",
    "parse_signatures",
    "verify",
]

Kind: TypeAlias = Literal["entry", "alias"]
KEY_PREFIX = "ed25519:"
LIBRARY_MISSING = "the library `cryptography` is not installed (pip install 'torch-cudal1[sign]')"
_KEY = re.compile(KEY_PREFIX + r"[0-9a-f]{64}")
_HEX = re.compile(r"(?:[0-9a-f]{2})*")
_SIGNATURE_BYTES = 64
# Each costs a verification at every load.
_MAX_SIGNATURES = 16
_MAX_KEY_BYTES = 16 << 10
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, order=True)
class Signature:
    """One signature as a file holds it. `key`: "ed25519:" and the public key in hex; `value`: the
    signature in hex.
    """

    key: str
    value: str

    def to_json(self) -> dict[str, str]:
        """A JSON object."""
        return {"key": self.key, "value": self.value}


@dataclass(frozen=True)
class Signer:
    """A private key in use. `public` is what others put on their list."""

    public: str
    _private: Ed25519PrivateKey

    def sign(self, kind: Kind, digest: str) -> Signature:
        """Sign a record's digest. The same key and digest give the same signature."""
        return Signature(self.public, self._private.sign(_encode_message(kind, digest)).hex())


def parse_signatures(value: Any) -> tuple[Signature, ...]:
    """What a file holds under "signatures". Raises ValueError for anything but a sorted list, of
    one signature a key.
    """
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_SIGNATURES:
        raise ValueError(f"signatures are no list of 1 to {_MAX_SIGNATURES}")
    signatures = tuple(_parse_signature(item) for item in value)
    # One order only: two spellings of one list would be two files with one digest.
    if list(signatures) != sorted({signature.key: signature for signature in signatures}.values()):
        raise ValueError("signatures are not in order, or two are by one key")
    return signatures


def add_signature(signatures: Sequence[Signature], added: Signature) -> tuple[Signature, ...]:
    """`signatures` and `added`, which replaces one by the same key."""
    return tuple(
        sorted(
            {**{signature.key: signature for signature in signatures}, added.key: added}.values()
        )
    )


def verify(signature: Signature, kind: Kind, digest: str) -> Refusal | None:
    """None if the holder of `signature.key` signed exactly this digest as this kind of record, else
    why that is not shown.
    """
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        return Refusal(LIBRARY_MISSING)
    value = bytes.fromhex(signature.value)
    if len(value) != _SIGNATURE_BYTES:
        return Refusal(f"the signature has {len(value)} bytes, expected {_SIGNATURE_BYTES}")
    try:
        Ed25519PublicKey.from_public_bytes(
            bytes.fromhex(signature.key.removeprefix(KEY_PREFIX))
        ).verify(value, _encode_message(kind, digest))
    except InvalidSignature:
        return Refusal(
            "the signature does not fit: file or signature were altered, or it was made for "
            "another file"
        )
    return None


def parse_public(text: Any) -> str | Refusal:
    """A public key in the one form it is written in, or why `text` is none."""
    if isinstance(text, str) and _KEY.fullmatch(text):
        return text
    return Refusal(
        f"{text!r} is no public key; expected {KEY_PREFIX!r} and 64 hex digits (0-9, a-f)"
    )


def create_key(name: str, path: Path, *, keep_out_of: Sequence[Path]) -> str:
    """Write a fresh private key to `path`, which must not exist; its public key. Raises
    SettingError, and OSError from the disk.

    `keep_out_of`: the cache folders, which are copied and shared.
    """
    if not _NAME.fullmatch(name):
        raise SettingError(
            "NAME", name, "a name of letters, digits, '.', '_' and '-', such as 'platform-team'"
        )
    _keep_out(path, keep_out_of)
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise SettingError(
            "keys new", name, f"an installation that can sign: {LIBRARY_MISSING}"
        ) from error
    private = Ed25519PrivateKey.generate()
    text = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        handle = os.open(
            # O_EXCL and O_NOFOLLOW: neither a file nor a link that is there is written to, and no
            # moment passes between the question and the creation.
            path,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0),
            0o600,
        )
    except FileExistsError as error:
        raise SettingError(
            "KEYFILE", str(path), "a path where nothing is yet: a key is never overwritten"
        ) from error
    with open(handle, "wb") as file:
        # Whatever the umask.
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return _encode_public(private)


def load_signer(path: Path, *, keep_out_of: Sequence[Path]) -> Signer:
    """The key that `create_key` wrote. Raises SettingError for a file that others may read, or that
    holds no such key.
    """
    _keep_out(path, keep_out_of)
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise SettingError(
            "KEYFILE", str(path), f"an installation that can sign: {LIBRARY_MISSING}"
        ) from error
    try:
        with open(path, "rb") as file:
            # Of the open file: the path may be exchanged between a `stat` and the `open`.
            mode = os.fstat(file.fileno()).st_mode
            # Bounded: the path comes from a command line and may name any file.
            data = file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise SettingError(
            "KEYFILE",
            str(path),
            f"a private key that can be read ({type(error).__name__}: {error})",
        ) from error
    # A user who can read the key can sign with it, and one who can write it can exchange it.
    if mode & 0o077:
        permissions = stat.filemode(mode)
        raise SettingError(
            "KEYFILE",
            str(path),
            f"a file that nobody else may read or write, found {permissions}: chmod 600 {path}",
        )
    try:
        private = load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise SettingError(
            "KEYFILE",
            str(path),
            "a private key as `cudal1 keys new` writes it, unencrypted PKCS #8 PEM",
        ) from error
    # The PEM may hold any kind of key, such as RSA.
    if not isinstance(private, Ed25519PrivateKey):
        raise SettingError("KEYFILE", str(path), f"an ed25519 key, found {type(private).__name__}")
    return Signer(_encode_public(private), private)


def _encode_public(private: Ed25519PrivateKey) -> str:
    return KEY_PREFIX + private.public_key().public_bytes_raw().hex()


def _keep_out(path: Path, folders: Sequence[Path]) -> None:
    # Resolved, because a link outside the cache may lead into it.
    real = path.resolve()
    for folder in folders:
        if real.is_relative_to(folder.resolve()):
            raise SettingError(
                "KEYFILE",
                str(path),
                f"a path outside the cache {folder}: caches are copied and shared, private keys "
                f"never",
            )


def _encode_message(kind: Kind, digest: str) -> bytes:
    """What is signed: no other protocol signs these bytes, and no decision record can be shown for
    an entry.
    """
    # The prefix and the kind separate this signature from those of other protocols, and an entry's
    # from a decision record's of the same digest.
    return f"torch-cudal1 signature 1\n{kind}\n{digest}\n".encode()


def _parse_signature(item: Any) -> Signature:
    # The digest does not cover signatures, so no other byte may stand among them.
    if not isinstance(item, Mapping) or set(item) != {"key", "value"}:
        raise ValueError(f"{item!r} is no signature; expected key and value")
    key, value = parse_public(item["key"]), item["value"]
    if isinstance(key, Refusal):
        raise ValueError(key.reason)
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ValueError("a signature is not in hex digits")
    return Signature(key, value)
