"""sum, mean, amax, amin, prod, any, all, var, std, vector norm, max and min with index, argmax and
argmin.

An arg-reduction packs (ordered key, position) into one int64 and takes its maximum: ties give the
first position, the first NaN wins, as in eager, and no special reduction is needed. Bytes moved:
one read of the tensor, one write of the result.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.affine import row_major
from torch_cudal1.kernels.expr.nodes import (
    LinearIndex,
    Node,
    cast,
    constant,
    pointwise,
    reduce,
    reshape,
)
from torch_cudal1.kernels.ops.handlers import Handler, div, sqrt
from torch_cudal1.kernels.ops.norms import moments

__all__ = ["HANDLERS"]

_F32 = torch.float32
_UINT32_MAX = 0xFFFFFFFF


def _read_dims(node: Node, dims: Any) -> tuple[int, ...]:
    """The reduced dimensions; None or () is all of them."""
    rank = len(node.shape)
    if isinstance(dims, int):
        return (dims % rank,) if rank else ()
    return tuple(d % rank for d in dims) if dims else tuple(range(rank))


def _finish(node: Node, outs: tuple[TensorSpec, ...], at: int = 0) -> Node:
    return reshape(pointwise("({0})", node, dtype=outs[at].torch_dtype), outs[at].shape)


def _make_reduction(kind: str) -> Handler:
    """sum, prod, amax, amin: second argument (if any) is the dimension or dimensions."""

    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        # Integers are summed in the result's type, as in eager: int32 would overflow.
        x = cast(args[0], outs[0].torch_dtype)
        if x.dtype is torch.bool:
            raise NotLowerableError(f"{kind} of bool into bool")
        return (_finish(reduce(kind, x, _read_dims(x, args[1] if len(args) > 1 else None)), outs),)

    return handle


def _mean(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    # Half types are summed in fp32, as in eager; only the result is rounded.
    x = cast(args[0], _F32)
    dims = _read_dims(x, args[1] if len(args) > 1 else None)
    count = constant(math.prod(x.shape[d] for d in dims), _F32)
    return (_finish(div(reduce("sum", x, dims), count), outs),)


def _logical(kind: str) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        # Truth is folded as 0 and 1: the printer has neutral elements for int32, int64 and fp32
        # only.
        truth = cast(cast(args[0], torch.bool), torch.int32)
        # any is the maximum of 0 and 1, all the minimum.
        folded = reduce(kind, truth, _read_dims(truth, args[1] if len(args) > 1 else None))
        return (reshape(cast(folded, torch.bool), outs[0].shape),)

    return handle


def _variance(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Node, Node]:
    x = args[0]
    correction = kwargs.get("correction")
    # The same moments as in norms: two passes in registers, one pass where the row is read again.
    mean, _, variance = moments(
        x,
        _read_dims(x, args[1] if len(args) > 1 else None),
        # PyTorch's default is the unbiased estimate.
        1.0 if correction is None else float(correction),
    )
    return mean, variance


def _var(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    return (_finish(_variance(args, kwargs)[1], outs),)


def _std(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    return (_finish(sqrt(_variance(args, kwargs)[1]), outs),)


def _var_mean(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    mean, variance = _variance(args, kwargs)
    return _finish(variance, outs), _finish(mean, outs, 1)


def _vector_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    order = args[1] if len(args) > 1 else 2
    x = cast(args[0], _F32)
    dims = _read_dims(x, args[2] if len(args) > 2 else None)
    if order == 2:
        return (_finish(sqrt(reduce("sum", pointwise("({0} * {0})", x, dtype=_F32), dims)), outs),)
    kind = {1: "sum", math.inf: "max"}.get(order)
    if kind is None:
        raise NotLowerableError(f"vector norm of order {order}")
    return (_finish(reduce(kind, pointwise("tl.abs({0})", x, dtype=_F32), dims), outs),)


def _extreme_position(x: Node, dims: tuple[int, ...], kind: str) -> Node:
    """int64 position of the extreme value within `dims` (row-major), dimensions kept."""
    # The position has the lower 32 bits of the packed number, so that neither may be wider.
    if math.prod(x.shape[d] for d in dims) > _UINT32_MAX or x.compute == "tl.int64":
        raise NotLowerableError(f"arg-reduction of {x.dtype} over {x.shape}")
    # PyTorch's position counts through the reduced dimensions in row-major order.
    strides = row_major(tuple(x.shape[d] for d in dims))
    where = LinearIndex(
        x.shape,
        torch.int64,
        tuple(strides[dims.index(d)] if d in dims else 0 for d in range(len(x.shape))),
    )
    # Adding 0.0 makes -0 and +0 equal; the exclusive or then gives an int32 that orders like the
    # float. A key of NaN is the largest, so that the first NaN wins, as in eager.
    if x.compute == "tl.float32":
        bits = pointwise("({0} + 0.0).to(tl.int32, bitcast=True)", x, dtype=torch.int32)
        key = pointwise("({0} ^ (({0} >> 31) & 0x7fffffff))", bits, dtype=torch.int32)
        # -1 - x reverses the order without overflow, which -x has at the smallest integer.
        key = pointwise("(-1 - {0})", key, dtype=torch.int32) if kind == "min" else key
        key = pointwise("tl.where({1} != {1}, 0x7fffffff, {0})", key, x, dtype=torch.int32)
    else:
        key = cast(x, torch.int32)
        key = pointwise("(-1 - {0})", key, dtype=torch.int32) if kind == "min" else key
    # Of equal keys the maximum takes the larger lower half: positions are stored from the end, so
    # that the first one wins.
    packed = pointwise(
        "(({0}.to(tl.int64) << 32) | (0xffffffff - {1}))", key, where, dtype=torch.int64
    )
    return pointwise(
        "(0xffffffff - ({0} & 0xffffffff))", reduce("max", packed, dims), dtype=torch.int64
    )


def _arg(kind: str) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        return (
            _finish(
                _extreme_position(
                    args[0], _read_dims(args[0], args[1] if len(args) > 1 else None), kind
                ),
                outs,
            ),
        )

    return handle


def _with_index(kind: str) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        x, dims = args[0], _read_dims(args[0], args[1])
        # Two reductions of one tile: value and position need no kernel of their own.
        return _finish(reduce(kind, x, dims), outs), _finish(
            _extreme_position(x, dims, kind), outs, 1
        )

    return handle


def _legacy_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    """`norm.ScalarOpt_dim` and `norm.Scalar`: the order is the second argument, None for 2."""
    order = 2 if len(args) < 2 or args[1] is None else args[1]
    return _vector_norm((args[0], order, *args[2:3]), {}, outs)


HANDLERS: dict[str, Handler] = {
    **{f"norm.{o}": _legacy_norm for o in ("Scalar", "ScalarOpt_dim")},
    **{f"sum.{o}": _make_reduction("sum") for o in ("default", "dim_IntList")},
    **{f"prod.{o}": _make_reduction("prod") for o in ("default", "dim_int")},
    **{f"mean.{o}": _mean for o in ("default", "dim")},
    **{f"any.{o}": _logical("max") for o in ("default", "dim", "dims")},
    **{f"all.{o}": _logical("min") for o in ("default", "dim", "dims")},
    "amax.default": _make_reduction("max"),
    "amin.default": _make_reduction("min"),
    "max.default": _make_reduction("max"),
    "min.default": _make_reduction("min"),
    "max.dim": _with_index("max"),
    "min.dim": _with_index("min"),
    "argmax.default": _arg("max"),
    "argmin.default": _arg("min"),
    "var.correction": _var,
    "std.correction": _std,
    "var_mean.correction": _var_mean,
    "linalg_vector_norm.default": _vector_norm,
}
