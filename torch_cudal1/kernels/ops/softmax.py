"""softmax, log_softmax, logsumexp and the softmax backwards, as maximum, exponential and sum of one
row.

Bytes moved: one read and one write of the tensor when a row fits the registers of one program or of
a group of CTAs, else two reads (maximum and sum, then output) and one write.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.nodes import (
    Map,
    Node,
    OnlineVariant,
    Softmax,
    cast,
    pointwise,
    reduce,
    reshape,
)
from torch_cudal1.kernels.ops.handlers import Handler, div

__all__ = ["HANDLERS"]

_F32 = torch.float32


def _shift_and_sum(x: Node, dim: int) -> tuple[Node, Node, Node, Node]:
    """`max(x)`, `x` less that, its exponential, and the sum of that along `dim`."""
    x = cast(x, _F32)
    dims = (dim % len(x.shape),) if x.shape else ()
    # The maximum is taken off before the exponential, which would overflow above 88.
    top = reduce("max", x, dims)
    shifted = pointwise("({0} - {1})", x, top, dtype=_F32)
    exponential = pointwise("libdevice.exp({0})", shifted, dtype=_F32)
    total = reduce("sum", exponential, dims)
    return (
        top,
        shifted,
        exponential,
        # Where the row is read again for each reduction, one pass gives the sum of exponentials
        # too.
        OnlineVariant(total.shape, _F32, total, reduce("expsum", x, dims)),
    )


def _softmax(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    _, _, exponential, total = _shift_and_sum(args[0], args[1])
    return (_mark_softmax(_retype(outs, div(exponential, total)), args, safe=False),)


def _safe_softmax(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    """0 in rows of nothing but minus infinity, where softmax has NaN: rows that a mask hides all
    keys from.
    """
    top, _, exponential, total = _shift_and_sum(args[0], args[1])
    # The division is computed all the same and yields NaN there: only the selection is 0.
    probabilities = pointwise(
        'tl.where({0} == float("-inf"), 0.0, {1})', top, div(exponential, total), dtype=_F32
    )
    return (_mark_softmax(_retype(outs, probabilities), args, safe=True),)


def _mark_softmax(probabilities: Node, args: tuple[Any, ...], *, safe: bool) -> Node:
    """`probabilities` as a softmax along the last dimension, if it is one."""
    if (
        # Attention kernels sum along the last dimension of the scores only.
        isinstance(probabilities, Map)
        and probabilities.shape
        and args[1] % len(probabilities.shape) == len(probabilities.shape) - 1
    ):
        # The scores go with the node: attention kernels compute the softmax from them, online.
        return Softmax(
            probabilities.shape,
            probabilities.dtype,
            probabilities.template,
            probabilities.args,
            args[0],
            safe=safe,
        )
    return probabilities


def _log_softmax(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    _, shifted, _, total = _shift_and_sum(args[0], args[1])
    return (_retype(outs, pointwise("({0} - libdevice.log({1}))", shifted, total, dtype=_F32)),)


def _retype(outs: tuple[TensorSpec, ...], node: Node) -> Node:
    # Values stay in fp32; only their nominal dtype changes. The store rounds.
    return pointwise("({0})", node, dtype=outs[0].torch_dtype)


def _logsumexp(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    x = cast(args[0], _F32)
    dims = tuple(d % len(x.shape) for d in args[1])
    top = reduce("max", x, dims)
    # The difference of two infinities would be NaN.
    finite = pointwise('tl.where(tl.abs({0}) == float("inf"), 0.0, {0})', top, dtype=_F32)
    total = reduce("sum", pointwise("libdevice.exp({0} - {1})", x, finite, dtype=_F32), dims)
    result = pointwise("(libdevice.log({0}) + {1})", total, finite, dtype=outs[0].torch_dtype)
    return (reshape(result, outs[0].shape),)


def _backward(template: str) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        grad, output = cast(args[0], _F32), cast(args[1], _F32)
        dims = (args[2] % len(output.shape),) if output.shape else ()
        folded = (
            # log_softmax's backward sums the gradients themselves.
            pointwise("({0} * {1})", grad, output, dtype=_F32) if "exp" not in template else grad
        )
        total = reduce("sum", folded, dims)
        return (pointwise(template, grad, output, total, dtype=outs[0].torch_dtype),)

    return handle


HANDLERS: dict[str, Handler] = {
    "_softmax.default": _softmax,
    "_safe_softmax.default": _safe_softmax,
    "_log_softmax.default": _log_softmax,
    "logsumexp.default": _logsumexp,
    "_softmax_backward_data.default": _backward("({1} * ({0} - {2}))"),
    "_log_softmax_backward_data.default": _backward("({0} - libdevice.exp({1}) * {2})"),
}
