"""Form and memory of a Program's outputs, told before it runs."""

from __future__ import annotations

from dataclasses import replace

from tests.judge.programs import linear_relu
from torch_cudal1.judge.checks.static.output_outline import find_difference, outline_outputs

REGION = linear_relu()


def test_the_same_program_has_no_difference() -> None:
    (outline,) = outline_outputs(REGION.program)
    assert outline is not None
    assert not outline.inputs
    assert find_difference(outline, outline) == ""


def test_an_output_in_the_memory_of_an_input_is_reported() -> None:
    (outline,) = outline_outputs(replace(REGION.program, outputs=(0,)))
    assert outline is not None
    assert outline.inputs == frozenset({0})
    assert find_difference(outline, replace(outline, inputs=frozenset())).startswith(
        "is memory of input 0"
    )
