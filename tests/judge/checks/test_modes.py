"""A state dict beside the reference's: names, dtypes and shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.judge.checks.module_semantics.modes import _find_state_problem

REFERENCE: Any = SimpleNamespace(
    form=SimpleNamespace(names=("weight", "bias")),
    specs=(TensorSpec.of(torch.empty(3, 2)), TensorSpec.of(torch.empty(3))),
)
WEIGHT, BIAS = ["weight", "float32", [3, 2]], ["bias", "float32", [3]]


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ([WEIGHT, BIAS], ""),
        ([WEIGHT], "lacks ['bias']"),
        ([WEIGHT, BIAS, ["kept", "float32", [1]]], "has ['kept']"),
        ([WEIGHT, ["bias", "float16", [3]]], "bias is"),
        ([["weight", "float32", [2, 3]], BIAS], "weight is"),
    ],
)
def test_names_dtypes_and_shapes_are_the_references(state: list[Any], problem: str) -> None:
    told = _find_state_problem(REFERENCE, state)
    assert problem in told if problem else not told
