"""`cudal1::run` runs a registered Program, knows its shapes, and has no gradient."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.runtime.operator import get_program, register, run_operator

RELU = Program(
    (TensorSpec("float32", (2, 3), (3, 1), "cpu"),),
    (Aten("aten.relu.default", (Value(0),), (), (1,)),),
    (1,),
)
X = torch.tensor([[-1.0, 0.0, 2.0], [3.0, -4.0, 5.0]])


def test_it_computes_what_the_program_computes() -> None:
    (result,) = run_operator()([X], register(RELU))
    assert torch.equal(result, X.relu())


def test_fake_tensors_have_the_shapes_of_the_outputs() -> None:
    digest = register(RELU)
    with FakeTensorMode() as mode:
        (result,) = run_operator()([mode.from_tensor(X)], digest)
    assert (result.shape, result.stride()) == ((2, 3), (3, 1))


def test_an_unknown_program_and_a_gradient_are_refused() -> None:
    with pytest.raises(ProgramError, match="not registered"):
        get_program("0" * 64)
    with pytest.raises(ProgramError, match="no gradient"):
        run_operator()([X.clone().requires_grad_()], register(RELU))
