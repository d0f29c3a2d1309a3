"""Programs as data: the JSON form keeps everything, and says no to what is not data."""

from __future__ import annotations

import json
import math

import pytest
import torch

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.program import (
    Alloc,
    Aten,
    Call,
    Launch,
    LaunchArg,
    Program,
    TensorSpec,
    Value,
    canonical_json,
    decode_arg,
    encode_arg,
)

SPEC = TensorSpec("float32", (4, 8), (8, 1), "cpu")

ARGUMENTS = [
    None,
    True,
    7,
    -(2**70),
    1.5,
    math.inf,
    -0.0,
    "mean",
    torch.float16,
    torch.strided,
    torch.channels_last,
    Value(3),
    (Value(1), (2, None)),
    complex(1, -2),
    (),
]


def relu(of: int, out: int) -> Aten:
    return Aten("aten.relu.default", (Value(of),), (), (out,))


def launch_program() -> Program:
    cubin = torch.arange(64, dtype=torch.uint8)
    launch = Launch(
        payload="k",
        symbol="kernel",
        grid=(2, 1, 1),
        block=128,
        shared_bytes=1024,
        args=(
            LaunchArg("ptr", Value(0)),
            LaunchArg("ptr", Value(1)),
            LaunchArg("i32", 5),
            LaunchArg("fp32", 0.5),
            LaunchArg("null"),
        ),
        aligned=(0, 1),
    )
    spec = TensorSpec("float32", (4, 8), (8, 1), "cuda")
    inner = Program((spec,), (Alloc(1, spec), launch), (1,), payloads={"k": cubin})
    return Program((spec,), (Call(inner, (0,), (1,)),), (1, None))


@pytest.mark.parametrize("argument", ARGUMENTS, ids=repr)
def test_every_allowed_argument_survives_json(argument):
    text = json.dumps(encode_arg(argument), allow_nan=False)
    back = decode_arg(json.loads(text))
    assert back == argument
    assert str(back) == str(argument)  # tells -0.0 from 0.0


@pytest.mark.parametrize("argument", [object(), torch.ones(1), {"a": 1}, lambda: None, {1}])
def test_what_is_not_data_is_refused(argument):
    with pytest.raises(ProgramError, match="argument"):
        encode_arg(argument)


@pytest.mark.parametrize(
    "forged",
    [
        {"dtype": "nn"},
        {"dtype": "load"},
        {"layout": "float32"},
        {"device": "cpu:x:y"},
        {"call": "os.system"},
    ],
)
def test_forged_arguments_are_refused(forged):
    with pytest.raises((ProgramError, RuntimeError)):
        decode_arg(forged)


def test_a_program_with_kernels_survives_json():
    program = launch_program()
    text = canonical_json(program.to_json())
    back = Program.from_json(json.loads(text), program.all_payloads())
    assert back == program
    assert back.digest == program.digest
    assert back.launches
    assert back.device == "cuda"


def test_a_changed_payload_is_refused():
    program = launch_program()
    payloads = {name: tensor.clone() for name, tensor in program.all_payloads().items()}
    payloads["k"][5] ^= 1
    with pytest.raises(ProgramError, match="payload"):
        Program.from_json(program.to_json(), payloads)


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 99},
        {"steps": [{"op": "exec", "code": "print(1)"}]},
        {"steps": [{"op": "aten"}]},
        {"steps": None},
        {"inputs": [["float32", [1]]]},
    ],
)
def test_a_damaged_program_is_refused(damage):
    content = Program((SPEC,), (relu(0, 1),), (1,)).to_json() | damage
    with pytest.raises((ProgramError, ValueError)):
        Program.from_json(content, {})


def test_the_digest_sees_every_change():
    base = Program((SPEC,), (relu(0, 1),), (1,))
    variants = [
        Program((TensorSpec("float64", (4, 8), (8, 1), "cpu"),), base.steps, (1,)),
        Program((TensorSpec("float32", (4, 8), (1, 4), "cpu"),), base.steps, (1,)),
        Program((SPEC,), (Aten("aten.abs.default", (Value(0),), (), (1,)),), (1,)),
        Program((SPEC,), base.steps, (0,)),
        Program((SPEC,), base.steps, (1, 1)),
        base.with_constant("c", torch.ones(1)),
        base.with_constant("c", torch.zeros(1)),
    ]
    digests = {program.digest for program in (base, *variants)}
    assert len(digests) == len(variants) + 1
