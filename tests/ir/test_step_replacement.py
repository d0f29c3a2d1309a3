"""Other steps in the place of single ones."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.program import Aten, Step, TensorSpec, Value
from torch_cudal1.ir.step_replacement import make_restoring_steps, replace_steps
from torch_cudal1.runtime.executor import prepare

CPU = torch.device("cpu")
X = torch.arange(6.0).view(2, 3)


def negate_twice_more(numbers: Mapping[int, int], first: int) -> list[Step]:
    """-(-x) in place of a step of input 0."""
    return [
        Aten("aten.neg.default", (Value(numbers[0]),), (), (first,)),
        Aten("aten.neg.default", (Value(first),), (), (first + 1,)),
    ]


def test_values_behind_a_replaced_step_get_new_numbers() -> None:
    program = trace_program(lambda x: (x.exp() + 1.0, x.sin()), (X,))
    position = next(
        i
        for i, step in enumerate(program.steps)
        if isinstance(step, Aten) and step.target == "aten.exp.default"
    )
    replaced = replace_steps(program, {position: negate_twice_more})
    assert replaced is not None
    check_program(replaced)
    first, second = prepare(replaced, CPU)([X])
    assert first is not None
    assert second is not None
    assert torch.equal(first, X + 1.0)
    assert torch.equal(second, X.sin())


def test_nothing_is_replaced_where_a_step_has_no_other_form() -> None:
    program = trace_program(lambda x: x.exp(), (X,))
    assert replace_steps(program, {0: lambda *_: None}) is None


@pytest.mark.parametrize(
    "strides", [(12, 4, 1), (12, 1, 3), (1, 2, 6), (4, 8, 1)], ids=lambda strides: str(strides)
)
def test_a_layout_is_restored_by_a_copy(strides: tuple[int, ...]) -> None:
    shape = (2, 3, 4)
    out = TensorSpec("float32", shape, strides, "cpu")
    steps = make_restoring_steps(0, 1, out)
    assert steps is not None
    value = torch.arange(24.0).view(shape)
    for step, function in zip(
        steps,
        (torch.Tensor.permute, torch.Tensor.clone, torch.Tensor.permute),
        strict=True,
    ):
        assert isinstance(step, Aten)
        value = function(value, *step.args[1:], **dict(step.kwargs))  # type: ignore[operator]
    assert value.stride() == strides
    assert torch.equal(value, torch.arange(24.0).view(shape))


def test_a_layout_with_gaps_is_none_that_a_copy_has() -> None:
    assert make_restoring_steps(0, 1, TensorSpec("float32", (2, 3), (6, 2), "cpu")) is None
