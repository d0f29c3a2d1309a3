"""The table of element-wise operators: types, overloads, and what is refused."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.aten import overload
from torch_cudal1.kernels.ops.pointwise import HANDLERS
from torch_cudal1.kernels.registry import trace

X = torch.empty(8, 10)


@pytest.mark.parametrize("name", sorted(HANDLERS))
def test_each_entry_is_an_operator_of_pytorch(name: str) -> None:
    assert overload(name if name.startswith("prims.") else f"aten.{name}") is not None


@pytest.mark.parametrize(
    ("function", "x", "reason"),
    [
        (lambda x: x * x, X > 0, "arithmetic on bool"),
        (lambda x: x**5, X.long(), "integer power"),
        (lambda x: x.sin(), X, "no kernel expression"),
        (lambda x: x + 1, X.double(), "float64"),
    ],
)
def test_what_has_no_expression_is_refused(function, x: torch.Tensor, reason: str) -> None:
    with pytest.raises(NotLowerableError, match=reason):
        trace(trace_program(function, (x,)))
