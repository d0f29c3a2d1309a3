"""Specs of all values of a Program, without running it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.ir.stacks import capture_stack
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.value_specs import find_unaligned_values, output_specs, value_specs

X = TensorSpec("float32", (4, 6), (6, 1), "cpu")
TURNED = Program(
    (X,),
    (
        Aten("aten.t.default", (Value(0),), (), (1,)),
        Aten("aten.slice.Tensor", (Value(0), 1, 1, 5), (), (2,)),
    ),
    (1, None),
)


def test_views_have_their_own_strides_and_a_missing_output_has_no_spec() -> None:
    turned = TensorSpec("float32", (6, 4), (1, 6), "cpu")
    assert output_specs(TURNED) == [turned, None]
    assert value_specs(TURNED) == {0: X, 1: turned, 2: TensorSpec("float32", (4, 4), (6, 1), "cpu")}


def test_a_view_that_begins_between_multiples_is_unaligned() -> None:
    assert find_unaligned_values(TURNED, 16) == {2}
    assert find_unaligned_values(TURNED, 4) == set()


def test_a_program_is_run_on_fakes_once_and_the_caller_s_changes_are_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = capture_stack(2)
    specs = value_specs(program)
    expected = dict(specs)
    specs.clear()

    def refuse(program: Program) -> Any:
        raise AssertionError("it is run again")

    monkeypatch.setattr("torch_cudal1.ir.value_specs._fake_run", refuse)
    assert value_specs(program) == expected
    # The same steps with other outputs have the same values.
    assert value_specs(replace(program, outputs=(0,))) == expected
