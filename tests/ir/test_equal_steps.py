"""Steps that compute the same are merged, and nothing else."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.ir.equal_steps import merge_equal_steps
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Aten, Program, Step, TensorSpec, Value

X = TensorSpec("float32", (4, 4), (4, 1), "cpu")


def aten(name: str, *args: object, out: int, **keywords: object) -> Aten:
    return Aten(f"aten.{name}", args, tuple(sorted(keywords.items())), (out,))


def read(number: int) -> Value:
    return Value(number)


SINE_TWICE = (
    aten("sin.default", read(0), out=1),
    aten("sin.default", read(0), out=2),
    aten("add.Tensor", read(1), read(2), out=3),
)


def test_an_equal_step_is_computed_once_with_the_same_result() -> None:
    program = Program((X,), SINE_TWICE, (3,))
    merged = merge_equal_steps(program)
    assert [step.target for step in merged.steps] == ["aten.sin.default", "aten.add.Tensor"]
    x, cpu = torch.randn(4, 4), torch.device("cpu")
    assert torch.equal(interpret(merged, cpu)([x])[0], interpret(program, cpu)([x])[0])


def test_what_follows_from_merged_steps_is_merged_too() -> None:
    steps = (
        *SINE_TWICE[:2],
        aten("cos.default", read(1), out=3),
        aten("cos.default", read(2), out=4),
        aten("add.Tensor", read(3), read(4), out=5),
    )
    assert len(merge_equal_steps(Program((X,), steps, (5,))).steps) == 3


@pytest.mark.parametrize(
    ("steps", "outputs"),
    [
        # The caller may write to one of two results.
        (SINE_TWICE[:2], (1, 2)),
        ((*SINE_TWICE[:2], aten("t.default", read(2), out=3)), (1, 3)),
        # Equal to Python, and not to ATen.
        (
            (
                aten("mul.Tensor", read(0), 2, out=1),
                aten("mul.Tensor", read(0), 2.0, out=2),
                aten("add.Tensor", read(1), read(2), out=3),
            ),
            (3,),
        ),
        (
            (
                aten("rand_like.default", read(0), out=1),
                aten("rand_like.default", read(0), out=2),
                aten("add.Tensor", read(1), read(2), out=3),
            ),
            (3,),
        ),
    ],
    ids=["outputs", "a view as output", "an integer and a float", "random numbers"],
)
def test_what_must_stay_apart_stays(steps: tuple[Step, ...], outputs: tuple[int, ...]) -> None:
    program = Program((X,), steps, outputs)
    assert merge_equal_steps(program) == program
