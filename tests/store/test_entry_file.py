"""An entry file gives back what was put in, and nothing else is ever taken for one."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load, save

from tests.store.conftest import make_entry, program
from torch_cudal1.core.errors import ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.program import canonical_json
from torch_cudal1.ir.records import Candidate, Contract, Entry
from torch_cudal1.store.cache.entry_file import (
    METADATA_KEY,
    decode_entry,
    decode_golden,
    decode_plain,
    digest_of,
    encode_entry,
    encode_plain,
)

GOLDEN = {
    "in0": torch.linspace(-1, 1, 9),
    "out0": torch.tensor([1.5, math.nan], dtype=torch.float64),
}


def rewritten(
    content: bytes, change: Callable[[dict], None], *, resign: bool = True, spaced: bool = False
) -> bytes:
    """The file with changed metadata; with `resign`, as its author would have signed it."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    meta = json.loads(header["__metadata__"][METADATA_KEY])
    digest = meta.pop("digest")
    change(meta)
    meta["digest"] = digest_of(meta) if resign else digest
    header["__metadata__"][METADATA_KEY] = json.dumps(meta) if spaced else canonical_json(meta)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def is_unreadable(content: bytes, why: str = "") -> bool:
    decoded = decode_entry(content)
    return (
        isinstance(decoded, Refusal)
        and decoded.reason.startswith("unreadable: ")
        and why in decoded.reason
    )


def test_an_entry_comes_back_equal(entry: Entry) -> None:
    back = decode_entry(encode_entry(entry))
    assert isinstance(back, Entry)
    assert back.choice == entry.choice
    assert back.choice.digest == entry.choice.digest
    assert (back.region_key, back.region_name, back.target, back.contract) == (
        entry.region_key,
        entry.region_name,
        entry.target,
        entry.contract,
    )
    assert back.evidence == entry.evidence
    assert back.tried == entry.tried
    assert back.speedup == 1.25


def test_payloads_come_back_bit_for_bit_and_aligned(entry: Entry) -> None:
    back = decode_entry(encode_entry(entry, GOLDEN))
    assert isinstance(back, Entry)
    expected, payloads = entry.choice.program.all_payloads(), back.choice.program.all_payloads()
    assert set(expected) == set(payloads)
    for name, tensor in expected.items():
        assert torch.equal(tensor, payloads[name])
        assert tensor.dtype == payloads[name].dtype
        assert (
            payloads[name].data_ptr() % 64 == 0
        )  # bytes in the file are packed; what is loaded must not depend on that


def test_golden_vectors_come_back_beside_the_entry(entry: Entry) -> None:
    golden = decode_golden(encode_entry(entry, GOLDEN))
    assert isinstance(golden, dict)
    assert set(golden) == set(GOLDEN)
    assert all(torch.equal(golden[k].nan_to_num(7.0), GOLDEN[k].nan_to_num(7.0)) for k in GOLDEN)
    assert decode_golden(encode_entry(entry)) == {}


def test_equal_content_gives_equal_bytes() -> None:
    scrambled = dict(reversed(list(make_entry().evidence.items())))
    assert (
        len(
            {
                encode_entry(make_entry(evidence=e), GOLDEN)
                for e in (make_entry().evidence, scrambled, copy.deepcopy(scrambled))
            }
        )
        == 1
    )


def test_different_content_gives_different_bytes() -> None:
    variants = [
        make_entry(),
        make_entry(region_name="x"),
        make_entry(contract=Contract("strict")),
        make_entry(created="later"),
    ]
    assert len({hashlib.sha256(encode_entry(e)).digest() for e in variants}) == len(variants)


@pytest.mark.parametrize(
    "value",
    [math.inf, -math.inf, 0.1, 1e-310, 5, None, True, "nan", {"float": 3}, [[], {}]],
    ids=repr,
)
def test_numbers_that_json_lacks_survive(value: object) -> None:
    assert decode_plain(json.loads(canonical_json(encode_plain(value)))) == value


def test_nan_survives() -> None:
    assert math.isnan(decode_plain(json.loads(canonical_json(encode_plain([math.nan]))))[0])


@pytest.mark.parametrize(
    "value",
    [object(), {1: 2}, torch.ones(1), {"a": {3, 4}}],
    ids=["object", "integer keys", "tensor", "set inside"],
)
def test_objects_are_not_plain(value: object) -> None:
    with pytest.raises(TypeError):
        encode_plain(value)


def test_a_payload_with_strides_is_refused() -> None:
    strided = program().with_constant("t", torch.ones(3, 2).t())
    with pytest.raises(ProgramError, match="contiguous"):
        encode_entry(make_entry(choice=Candidate(strided, "eager", "rewrites")))


def test_a_choice_without_timing_is_refused() -> None:
    with pytest.raises(ProgramError, match="timing"):
        encode_entry(make_entry(evidence={}))


# Every way a file can be damaged
# ---------------------------------------------------------------------------------------------


def test_every_truncation_is_a_miss(entry: Entry) -> None:
    content = encode_entry(entry)
    for size in [*range(40), *range(40, len(content), 97), len(content) - 1]:
        assert is_unreadable(content[:size]), size


def test_extended_files_are_a_miss(entry: Entry) -> None:
    content = encode_entry(entry)
    assert is_unreadable(content + b"\0")
    assert is_unreadable(content + content)


def test_every_flipped_bit_is_a_miss(entry: Entry) -> None:
    content = encode_entry(entry, GOLDEN)
    random.seed(0)
    header = int.from_bytes(content[:8], "little") + 8
    places = [(i, b) for i in [*range(64), *range(header - 8, len(content))] for b in range(8)]
    places += [(random.randrange(header), random.randrange(8)) for _ in range(400)]
    for place, bit in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        assert is_unreadable(bytes(flipped)), (place, bit, content[place])


@pytest.mark.parametrize("size", [2**64 - 1, 2**63, 2**31, 10**6, 1, 0])
def test_absurd_header_lengths_are_a_miss(entry: Entry, size: int) -> None:
    assert is_unreadable(size.to_bytes(8, "little") + encode_entry(entry)[8:])


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_a_miss(seed: int) -> None:
    generator = random.Random(seed)
    assert is_unreadable(generator.randbytes(generator.choice([0, 1, 7, 8, 9, 100, 5000])))


def test_foreign_safetensors_files_are_a_miss() -> None:
    assert is_unreadable(save({"weight": torch.ones(3)}), "not a file of this package")
    assert is_unreadable(
        save({"weight": torch.ones(3)}, metadata={"format": "pt"}), "not a file of this package"
    )
    assert is_unreadable(save({"weight": torch.ones(3)}, metadata={METADATA_KEY: "{}"}), "digest")
    assert is_unreadable(
        save({"weight": torch.ones(3)}, metadata={METADATA_KEY: "[" * 100_000}), "Recursion"
    )


def test_a_changed_text_needs_its_digest(entry: Entry) -> None:
    content = rewritten(
        encode_entry(entry), lambda meta: meta["evidence"]["timing"].update(low=99.0), resign=False
    )
    assert is_unreadable(content, "digest of the metadata")


def test_a_tensor_that_the_metadata_does_not_name_is_a_miss(entry: Entry) -> None:
    content = encode_entry(entry)
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    tensors = load(content)
    assert isinstance(decode_entry(save(tensors, metadata=metadata)), Entry)
    assert is_unreadable(
        save(tensors | {"payload.more": torch.ones(1)}, metadata=metadata), "payload.more"
    )
    assert is_unreadable(save(tensors | {"weight": torch.ones(1)}, metadata=metadata), "weight")


def test_one_content_has_one_text(entry: Entry) -> None:
    assert is_unreadable(
        rewritten(encode_entry(entry), lambda meta: None, spaced=True), "canonical"
    )


# Signed by whoever wrote it, but not an entry
# ----------------------------------------------------------------------------------

WRONG: dict[str, Callable[[dict], object]] = {
    "other format": lambda m: m.update(format=2),
    "no region": lambda m: m.pop("region"),
    "key is a number": lambda m: m["region"].update(key=5),
    "target lacks a field": lambda m: m["target"].pop("sku"),
    "unknown precision": lambda m: m["contract"].update(precision="sloppy"),
    "finite as text": lambda m: m["contract"].update(assume_finite="no"),
    "unknown schedule": lambda m: m["choice"].update(schedule="magic"),
    "techniques as numbers": lambda m: m["choice"].update(techniques=[1]),
    "evidence is a list": lambda m: m.update(evidence=[]),
    "timing is text": lambda m: m["evidence"].update(timing={"low": "fast"}),
    "tried holds text": lambda m: m.update(tried=["x"]),
    "payload digest": lambda m: m["choice"]["program"]["payloads"].update(c="0" * 64),
    "payload missing": lambda m: m["choice"]["program"]["payloads"].update(d="0" * 64),
    "payload not named": lambda m: m["choice"]["program"]["payloads"].pop("c"),
    "golden not there": lambda m: m["golden"].update(x="0" * 64),
    "golden is a list": lambda m: m.update(golden=[]),
    "program writes to its input": lambda m: m["choice"]["program"]["steps"][0].update(
        target="aten.add_.Tensor"
    ),
    "program reads ahead": lambda m: m["choice"]["program"]["steps"][0].update(
        args=[{"v": 9}, {"v": 0}]
    ),
    "program of an unknown operator": lambda m: m["choice"]["program"]["steps"][0].update(
        target="os.system.default"
    ),
    "unknown device": lambda m: m["choice"]["program"]["steps"][0].update(
        args=[{"device": "toaster"}]
    ),
    "broken float": lambda m: m["choice"]["program"]["steps"][0].update(
        args=[{"float": "0x1p999999"}]
    ),
    "two-key argument": lambda m: m["choice"]["program"]["steps"][0].update(
        args=[{"v": 1, "w": 2}]
    ),
    "program is null": lambda m: m["choice"].update(program=None),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_signed_file_that_is_no_entry_is_a_miss(
    entry: Entry, change: Callable[[dict], object]
) -> None:
    assert is_unreadable(rewritten(encode_entry(entry), lambda meta: change(meta) and None))


def test_rewriting_without_a_change_is_readable(entry: Entry) -> None:
    assert isinstance(decode_entry(rewritten(encode_entry(entry), lambda meta: None)), Entry)
