"""Specs of all values of a Program, without running it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.ir.stacks import ROWS, WIDTH, capture_stack, make_stack
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.value_specs import (
    _compute_step_by_step,
    find_unaligned_values,
    output_specs,
    value_specs,
)


class Spectrum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).conj().abs()


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


NUMBERS = Program(
    (TensorSpec("int64", (4, 6), (6, 1), "cpu"),),
    (
        Aten("aten.add.Scalar", (Value(0), 1), (), (1,)),
        Aten("aten.add.Scalar", (Value(0), 1.0), (), (2,)),
        Aten("aten.add.Scalar", (Value(0), True), (), (3,)),
        Aten("aten.t.default", (Value(1),), (), (4,)),
        Aten("aten.max.dim", (Value(4), 0), (), (5, 6), True),
    ),
    (6,),
)
NETS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "stack": (make_stack(3), torch.randn(ROWS, WIDTH)),
    "convolutions": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2)),
        torch.randn(2, 3, 16, 16).contiguous(memory_format=torch.channels_last),
    ),
    "attention": (
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        torch.randn(2, 5, 16),
    ),
    "complex numbers": (Spectrum(), torch.randn(4, 16)),
}


@pytest.mark.parametrize("name", ["numbers", *NETS])
def test_equal_steps_are_worked_out_once_and_are_those_of_the_whole(name: str) -> None:
    if name == "numbers":
        program = NUMBERS
    else:
        module, x = NETS[name]
        with torch.no_grad():
            (region,) = capture_regions(module.eval(), (x,))
        program = region.program
    whole = output_specs(replace(program, outputs=tuple(range(program.value_count))))
    expected = {index: spec for index, spec in enumerate(whole) if spec is not None}
    assert value_specs(program) == expected
    by_steps = _compute_step_by_step(program)
    assert by_steps == (None if name == "complex numbers" else expected)


def test_what_a_constant_decides_is_asked_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("its values are not known")

    monkeypatch.setattr("torch_cudal1.ir.value_specs._run_step", refuse)
    assert _compute_step_by_step(NUMBERS) is None
