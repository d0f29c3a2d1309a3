"""A Program arrives with its binaries as it was sent, and one that is no Program is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.adversarial.plans import on_cuda, product
from tests.judge.programs import linear_relu
from torch_cudal1.core.errors import ProgramError, SandboxError
from torch_cudal1.judge.wire.channel import save_tensors
from torch_cudal1.judge.wire.transport import (
    read_payloads,
    read_program,
    require_tensor,
    write_payloads,
)

PROGRAM = linear_relu().program


def test_a_program_without_binaries_arrives_as_it_was_sent(tmp_path: Path) -> None:
    packed = json.loads(json.dumps(write_payloads(PROGRAM, tmp_path / "payloads")))
    packed_program = json.loads(json.dumps(PROGRAM.to_json()))
    assert read_program(packed_program, packed) == PROGRAM


def test_binaries_arrive_byte_by_byte_under_their_names(tmp_path: Path) -> None:
    values = {"first": torch.arange(5, dtype=torch.uint8), "second": torch.ones(0)}
    layout = save_tensors(list(values.values()), tmp_path / "payloads")
    payloads = read_payloads([list(values), layout, str(tmp_path / "payloads")])
    assert list(payloads) == ["first", "second"]
    assert all(torch.equal(payloads[name], values[name]) for name in values)


def test_a_name_without_its_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "payloads"
    with pytest.raises(SandboxError, match="a tensor is missing"):
        read_payloads([["first"], save_tensors([None], path), str(path)])


def test_more_names_than_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "payloads"
    layout = save_tensors([torch.ones(2)], path)
    with pytest.raises(SandboxError, match="2 names came with 1 tensors"):
        read_payloads([["first", "second"], layout, str(path)])


def test_machine_code_travels_beside_the_json_of_its_program(tmp_path: Path) -> None:
    cubin = bytes(range(64))
    program = on_cuda(product("cuda"), cubin, "product", grid=32)
    packed = write_payloads(program, tmp_path / "payloads")
    text = json.dumps(program.to_json())
    received = read_program(json.loads(text), json.loads(json.dumps(packed)))
    assert received == program
    ((name, payload),) = received.all_payloads().items()
    assert bytes(payload.tolist()) == cubin
    assert packed[0] == [name]


def test_a_program_that_reads_a_value_which_no_step_made_is_refused(tmp_path: Path) -> None:
    broken = replace(PROGRAM, outputs=(5,)).to_json()
    broken["outputs"] = [77]
    with pytest.raises(ProgramError):
        read_program(broken, write_payloads(PROGRAM, tmp_path / "payloads"))


def test_a_tensor_that_is_there_comes_back() -> None:
    tensor = torch.ones(1)
    assert require_tensor(tensor) is tensor
    with pytest.raises(SandboxError, match="a tensor is missing"):
        require_tensor(None)
