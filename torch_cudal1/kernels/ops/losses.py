"""Losses as element-wise steps and sums: squared, absolute, smooth, Huber, binary and plain cross
entropy, negative log likelihood.

Composite losses (KL, hinge, cosine, triplet) reach the kernels as their parts. Bytes moved: one
read of each input. A sum over everything is split over many programs and put together in a fixed
order, so results repeat bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.nodes import (
    LinearIndex,
    Node,
    cast,
    constant,
    pointwise,
    reduce,
    reshape,
)
from torch_cudal1.kernels.ops.handlers import Handler, div

__all__ = ["HANDLERS"]

_F32 = torch.float32
# ATen's Reduction: none and mean; the third, 2, is the sum.
_NONE, _MEAN = 0, 1
_SMOOTH = "tl.where({0} < {1}, tl.div_rn(0.5 * {0} * {0}, {1}), {0} - 0.5 * {1})"
# The two differ by a factor of their width: ATen defines both so.
_HUBER = "tl.where({0} < {1}, 0.5 * {0} * {0}, {1} * ({0} - 0.5 * {1}))"
# the logarithms are kept from minus infinity, as ATen does
_BINARY = (
    "(({1} - 1.0) * tl.maximum(libdevice.log1p(-{0}), -100.0, propagate_nan=tl.PropagateNan.ALL)"
    " - {1} * tl.maximum(libdevice.log({0}), -100.0, propagate_nan=tl.PropagateNan.ALL))"
)


def _reduce_losses(each: Node, reduction: int, outs: tuple[TensorSpec, ...]) -> tuple[Node, ...]:
    """The losses themselves, their sum or their mean."""
    # A sum over everything is split over programs and put together in a fixed order, so that
    # results repeat.
    if reduction != _NONE:
        every = tuple(range(len(each.shape)))
        count = math.prod(each.shape)
        each = reduce("sum", each, every)
        each = div(each, constant(count, _F32)) if reduction == _MEAN else each
    return (reshape(pointwise("({0})", each, dtype=outs[0].torch_dtype), outs[0].shape),)


def _distance(args: tuple[Any, ...]) -> Node:
    x, target = cast(args[0], _F32), cast(args[1], _F32)
    return pointwise("tl.abs({0} - {1})", x, target, dtype=_F32)


def _mse(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    return _reduce_losses(
        pointwise("({0} * {0})", _distance(args), dtype=_F32),
        args[2] if len(args) > 2 else _MEAN,
        outs,
    )


def _with_width(template: str) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        width = args[3] if len(args) > 3 else 1.0
        each = _distance(args)
        # A width of 0 is the absolute distance, as in PyTorch; the formula would divide by it.
        if width != 0:
            each = pointwise(template, each, constant(width, _F32), dtype=_F32)
        return _reduce_losses(each, args[2] if len(args) > 2 else _MEAN, outs)

    return handle


def _binary(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    x, target, weight = cast(args[0], _F32), cast(args[1], _F32), args[2] if len(args) > 2 else None
    each = pointwise(_BINARY, x, target, dtype=_F32)
    each = (
        each if weight is None else pointwise("({0} * {1})", each, cast(weight, _F32), dtype=_F32)
    )
    return _reduce_losses(each, args[3] if len(args) > 3 else _MEAN, outs)


def _likelihood(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    """`nll_loss_forward`: minus the entry at the target's place, and how many targets counted. A
    row's entry is found by a sum.
    """
    x, target, weight, reduction, ignored = args
    if weight is not None or len(x.shape) != 2:
        raise NotLowerableError("likelihoods with weights, or of a single row")
    rows, classes = x.shape
    column = LinearIndex((rows, classes), torch.int64, (0, 1))
    target_column = reshape(cast(target, torch.int64), (rows, 1))
    # A sum over a row with a single element that is not 0 is exact, and needs no gather.
    picked = pointwise(
        "tl.where({0} == {1}, {2}, 0.0)", column, target_column, cast(x, _F32), dtype=_F32
    )
    entry = reshape(reduce("sum", picked, (1,)), (rows,))
    # a target that is no class is an assertion in eager; here it is NaN, never a number that looks
    # right
    valid = f"(({{0}} >= 0) & ({{0}} < {classes}))"
    loss_template = f'tl.where({{0}} == {{2}}, 0.0, tl.where({valid}, -{{1}}, float("nan")))'
    each = pointwise(
        loss_template, cast(target, torch.int64), entry, constant(ignored, torch.int64), dtype=_F32
    )
    if reduction == _NONE:
        return pointwise("({0})", each, dtype=outs[0].torch_dtype), constant(0, _F32)
    counted = pointwise(
        "({0} != {1}).to(tl.float32)",
        cast(target, torch.int64),
        constant(ignored, torch.int64),
        dtype=_F32,
    )
    # Ignored targets do not count: the mean divides by the number of the others, which is 0 / 0
    # where there are none, as in eager.
    count = reshape(reduce("sum", counted, (0,)), ())
    total = reshape(reduce("sum", each, (0,)), ())
    # Divided once, after the sum: a mean of rounded quotients would be less exact.
    loss = div(total, count) if reduction == _MEAN else total
    return pointwise("({0})", loss, dtype=outs[0].torch_dtype), pointwise(
        "({0})", count, dtype=outs[1].torch_dtype
    )


HANDLERS: dict[str, Handler] = {
    "mse_loss.default": _mse,
    "smooth_l1_loss.default": _with_width(_SMOOTH),
    "huber_loss.default": _with_width(_HUBER),
    "binary_cross_entropy.default": _binary,
    "nll_loss_forward.default": _likelihood,
}
