"""Entries as the judge would write them: with payloads, constants, nested Programs and numbers that
JSON does not know.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from torch_cudal1.ir.program import Aten, Call, Program, TensorSpec, Value, tensor_digest
from torch_cudal1.ir.records import Candidate, Contract, Entry, Target

HERE = Target("cpu", "x86_64", "Some CPU", "", "2.13.0", "3.7.1")
CONTRACT = Contract()


def program() -> Program:
    """x -> nested(x + constant), with one constant and one binary payload."""
    spec = TensorSpec("float32", (4,), (1,), "cpu")
    constant = torch.arange(4, dtype=torch.float32)
    blob = torch.arange(251, dtype=torch.uint8)
    inner = Program(
        inputs=(spec,),
        steps=(Aten("aten.mul.Tensor", (Value(0), 0.5), (), (1,)),),
        outputs=(1,),
        payloads={f"cubin-{tensor_digest(blob)[:8]}": blob},
    )
    return Program(
        inputs=(spec,),
        constants=("c",),
        steps=(
            Aten("aten.add.Tensor", (Value(0), Value(1)), (("alpha", 2),), (2,)),
            Call(inner, (2,), (3,)),
        ),
        outputs=(3,),
        payloads={"c": constant},
    )


def make_entry(**changes: Any) -> Entry:
    """A sample Entry; `changes` replace its fields."""
    entry = Entry(
        region_key="ab" * 32,
        region_name="block.0 (Größe)",
        target=HERE,
        contract=CONTRACT,
        choice=Candidate(program(), "inductor", "rewrites", ("diag_matmul",)),
        evidence={
            "timing": {"low": 1.25, "pairs": 30},
            "checks": [{"name": "numerics", "value": 0.1 + 0.2, "limit": None}],
        },
        tried=(
            {"label": "eager", "error": float("inf")},
            {"label": "bad", "error": float("-inf"), "ok": False},
        ),
        created="2025-01-01T00:00:00+00:00",
        package="0.1.0",
    )
    return dataclasses.replace(entry, **changes)


@pytest.fixture
def entry() -> Entry:
    """One sample Entry."""
    return make_entry()
