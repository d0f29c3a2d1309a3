"""Approximates what Inductor would make of a product and the element-wise steps behind it, so that
it can be timed without waiting for Inductor's compiler.

Inductor leaves the product to the library that eager uses, and does the rest in one pass. Eager
takes a pass for each step, and one more for the bias of a convolution. A kernel that is faster than
eager may still be slower than Inductor.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils.flop_counter import flop_registry

from torch_cudal1.ir.aliasing import is_view
from torch_cudal1.ir.aten import overload
from torch_cudal1.ir.program import Aten, Program, Step, Value

__all__ = ["approximate_fused_epilogue"]

_CONVOLUTION = "aten.convolution.default"
# The place of the bias among the arguments of a convolution.
_BIAS = 2
# Not tagged as pointwise, and yet done in the same pass: small windows of a pooling are read where
# they lie.
_FUSED_TOO = (
    "hardswish",
    "hardsigmoid",
    "_native_batch_norm_legit_no_training",
    "max_pool2d_with_indices",
    "avg_pool2d",
)


def approximate_fused_epilogue(program: Program) -> Program | None:
    """`program` up to its only product, then a ReLU in place of all later steps, which reads the
    product's result once and writes it once.

    None where there is not exactly one product, where no step follows it, or where Inductor would
    not do the steps behind it in one pass.
    """
    products = [position for position, step in enumerate(program.steps) if _is_product(step)]
    # With several products the intermediate results matter, and one pass no longer stands for them.
    if len(products) != 1:
        return None
    (product_position,) = products
    product, epilogue = (
        program.steps[product_position],
        [step for step in program.steps[product_position + 1 :] if not is_view(step)],
    )
    assert isinstance(product, Aten)
    if (
        not epilogue
        or not all(_is_elementwise(step) for step in epilogue)
        or len(product.outs) != 1
    ):
        return None
    if product.target == _CONVOLUTION:
        # Inductor adds the bias in the pass behind the convolution.
        product = replace(product, args=(*product.args[:_BIAS], None, *product.args[_BIAS + 1 :]))
    (result,) = product.outs
    steps = (
        *program.steps[:product_position],
        product,
        # Any element-wise step: the pass reads and writes memory, and its arithmetic costs nothing
        # beside that.
        Aten("aten.relu.default", (Value(result),), (), (result + 1,)),
    )
    return replace(program, steps=steps, outputs=(result + 1,))


def _is_product(step: Step) -> bool:
    return isinstance(step, Aten) and overload(step.target).overloadpacket in flop_registry


def _is_elementwise(step: Step) -> bool:
    if not isinstance(step, Aten):
        return False
    return (
        torch.Tag.pointwise in overload(step.target).tags or step.target.split(".")[1] in _FUSED_TOO
    )
