"""Signatures are read strictly, and one key signs a record once."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.trust.signatures import (
    Signature,
    add_signature,
    create_key,
    load_signer,
    parse_public,
    parse_signatures,
    verify,
)

DIGEST = "ab" * 32


def test_a_signature_fits_its_own_record_only(tmp_path: Path) -> None:
    create_key("team", tmp_path / "team.pem", keep_out_of=())
    signer = load_signer(tmp_path / "team.pem", keep_out_of=())
    signature = signer.sign("entry", DIGEST)
    assert verify(signature, "entry", DIGEST) is None
    assert isinstance(verify(signature, "alias", DIGEST), Refusal)
    assert isinstance(verify(signature, "entry", "cd" * 32), Refusal)
    short = verify(Signature(signature.key, "00"), "entry", DIGEST)
    assert short == Refusal("the signature has 1 bytes, expected 64")


def test_a_new_signature_replaces_one_by_the_same_key() -> None:
    first, second = (Signature("ed25519:" + digit * 64, "00") for digit in "ab")
    assert add_signature([second], first) == (first, second)
    assert add_signature([first], Signature(first.key, "11")) == (Signature(first.key, "11"),)


@pytest.mark.parametrize("value", [None, [], {}, [1], [{"key": "x", "value": "00"}]])
def test_what_is_no_list_of_signatures_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"signature|public key"):
        parse_signatures(value)


@pytest.mark.parametrize(
    "text", [None, 1, "", "ed25519:", "ed25519:" + "A" * 64, "rsa:" + "a" * 64]
)
def test_what_is_no_public_key_is_refused(text: object) -> None:
    assert isinstance(parse_public(text), Refusal)
