"""What a Program may name, and whether it writes or draws random numbers."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.aten import is_functional, is_random, name_of, overload
from torch_cudal1.ir.program import Value


@pytest.mark.parametrize("target", ["aten.relu.default", "aten.lstm.input", "aten.add.Tensor"])
def test_a_name_leads_to_an_operator_and_back(target: str) -> None:
    assert name_of(overload(target)) == target


@pytest.mark.parametrize(
    "target", ["os.system.default", "aten.relu", "aten.no_such.default", "aten.relu.default.x", ""]
)
def test_other_names_are_refused(target: str) -> None:
    with pytest.raises(ProgramError):
        overload(target)


def test_an_in_place_operator_is_not_functional() -> None:
    assert is_functional("aten.relu.default")
    assert not is_functional("aten.relu_.default")


def test_dropout_draws_numbers_only_where_it_trains_with_a_probability() -> None:
    attention = "aten.scaled_dot_product_attention.default"
    values = (Value(0), Value(1), Value(2), None)
    assert is_random("aten.rand.default", ([2],))
    assert not is_random("aten.relu.default", (Value(0),))
    assert is_random("aten.native_dropout.default", (Value(0), 0.5, True))
    assert not is_random("aten.native_dropout.default", (Value(0), 0.5, False))
    if torch.Tag.nondeterministic_seeded in overload(attention).tags:
        assert is_random(attention, (*values, 0.1))
    assert not is_random(attention, (*values, 0.0))
