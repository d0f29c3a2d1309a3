"""A product with one pass behind it, in place of the steps that eager takes one by one."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.ir.fusion_estimate import approximate_fused_epilogue
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value

CPU = torch.device("cpu")
X, W, B = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), torch.randn(4)
HOW = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
CONV = Aten("aten.convolution.default", (Value(0), Value(1), Value(2), *HOW), (), (3,))


def step(name: str, *args: object, out: int, kwargs: tuple[tuple[str, object], ...] = ()) -> Aten:
    return Aten(f"aten.{name}", args, kwargs, (out,))  # type: ignore[arg-type]


def program(*steps: Aten, inputs: tuple[torch.Tensor, ...] = (X, W, B)) -> Program:
    return Program(tuple(map(TensorSpec.of, inputs)), steps, (steps[-1].outs[0],), payloads={})


def test_a_convolution_leaves_its_bias_to_the_pass_behind_it() -> None:
    convolution = program(
        CONV, step("hardswish.default", Value(3), out=4), step("mul.Tensor", Value(4), 2.0, out=5)
    )
    estimated = approximate_fused_epilogue(convolution)
    assert estimated is not None
    assert [step.target for step in estimated.steps if isinstance(step, Aten)] == [
        "aten.convolution.default",
        "aten.relu.default",
    ]
    assert torch.equal(interpret(estimated, CPU)([X, W, B])[0], torch.conv2d(X, W).relu())


def test_what_comes_before_the_product_and_a_bias_that_it_adds_itself_stay() -> None:
    x, w = torch.randn(5, 6), torch.randn(4, 6)
    product = program(
        step("t.default", Value(1), out=3),
        step("addmm.default", Value(2), Value(0), Value(3), out=4),
        step("view.default", Value(4), (4, 5), out=5),
        step("gelu.default", Value(5), out=6),
        inputs=(x, w, B),
    )
    estimated = approximate_fused_epilogue(product)
    assert estimated is not None
    assert torch.equal(interpret(estimated, CPU)([x, w, B])[0], torch.addmm(B, x, w.t()).relu())


@pytest.mark.parametrize(
    "steps",
    [
        (CONV,),
        (CONV, step("view.default", Value(3), (-1,), out=4)),
        (CONV, step("_softmax.default", Value(3), 1, False, out=4)),
        (CONV, step("mean.dim", Value(3), (2, 3), out=4)),
        (step("relu.default", Value(0), out=3),),
        (
            CONV,
            step("relu.default", Value(3), out=4),
            step("convolution.default", Value(4), Value(4), None, *HOW, out=5),
        ),
    ],
    ids=[
        "nothing behind it",
        "only a view",
        "a softmax",
        "a reduction",
        "no product",
        "two products",
    ],
)
def test_what_inductor_would_not_fuse_is_not_estimated(steps: tuple[Aten, ...]) -> None:
    assert approximate_fused_epilogue(program(*steps)) is None
