"""What the rules that push a reduction through a linear operation share: parsing, walking up,
rebuilding, and exact infinities.

A pushed reduction adds up one factor before it is multiplied: sum_j x_k * w_jk becomes x_k * sum_j
w_jk. For finite numbers that is the distributive law. For an infinite x_k it is not: where the w_jk
differ in sign or one is 0, the left side is NaN, the right side is infinite. `split_signs` and
`choose` repair this exactly and cheaply. Beside the sum `s` a twin `g` is multiplied that equals
`s` where all summands had one strict sign and is 0 elsewhere; an infinite partner turns that 0 into
NaN, so "NaN in the twin" is the missing NaN, and finite values never touch it. NaN anywhere, and
infinities of the summed factor itself, come out right unaided. All of this speaks of results that
stay in range: where sums of finite numbers overflow, any order of adding has its own overflow.

Nothing here is a rule: which linear operations a reduction passes, and when that pays, is for the
rule files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
import torch.fx as fx

from torch_cudal1.device.specs import FP32_FLOPS_PER_ELEMENT
from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    dtype,
    is_op,
    is_tensor,
    scalar,
    shape,
    uses_once,
)

__all__ = [
    "FLOATS",
    "REDUCTIONS",
    "Kind",
    "Path",
    "Reduction",
    "choose",
    "emit_bounds",
    "emit_reduction",
    "estimate_work",
    "finish",
    "parse",
    "rebuild",
    "split_signs",
    "trace",
]

aten = torch.ops.aten
Kind: TypeAlias = Literal["sum", "mean"]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
REDUCTIONS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
_SCALES = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default)
# Adding commutes with a sum once the other operand is reduced too.
_ADDS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)


@dataclass(frozen=True)
class Reduction:
    """`node` is `kind` of `source` over `dims` (non-negative, sorted)."""

    node: fx.Node
    kind: Kind
    source: fx.Node
    dims: tuple[int, ...]
    keepdim: bool


@dataclass(frozen=True)
class Path:
    """From `root` up to the reduction: `steps` are applied to `root` in this order; `dims` are the
    reduced dims as `root` counts.

    Each step is the call and which of its arguments is the one that comes from `root`; `stops` are
    the dims as that call counts.
    """

    root: fx.Node
    dims: tuple[int, ...]
    steps: tuple[tuple[fx.Node, int], ...] = ()
    stops: tuple[tuple[int, ...], ...] = ()


def estimate_work(flops: float, elements: float) -> float:
    """A rough cost in "elements moved", for comparing two forms of one computation."""
    # Relative cost alone matters, so one unit for arithmetic and memory will do.
    return flops / FP32_FLOPS_PER_ELEMENT + elements


def parse(node: fx.Node) -> Reduction | None:
    """`node` as a floating-point sum or mean over a non-empty tensor that keeps the dtype; None if
    it is anything else.

    float16 sums are left alone: a partial sum may pass 65,504 although the result does not (means
    cannot).
    """
    if not is_op(node, *REDUCTIONS) or not is_tensor(node.args[0]):
        return None
    bound = arguments(node)
    source = bound["self"]
    kind: Kind = "mean" if is_op(node, aten.mean.default, aten.mean.dim) else "sum"
    source_dtype = dtype(source)
    if (
        source_dtype not in FLOATS
        or dtype(node) != source_dtype
        # The mean of nothing is NaN, which no product makes.
        or 0 in shape(source)
        # float16 ends at 65,504: the factor's sum may overflow where the result does not.
        or (source_dtype == torch.float16 and kind == "sum")
    ):
        return None
    rank = len(shape(source))
    # No dims mean all of them.
    dims = bound.get("dim") or range(rank)
    return Reduction(
        node,
        kind,
        source,
        tuple(sorted({dim % rank for dim in dims})) if rank else (),
        bool(bound.get("keepdim")),
    )


def trace(
    node: Any, dims: Sequence[int], accepts: Callable[[fx.Node, tuple[int, ...]], bool]
) -> Path | None:
    """Walk up from `node`, over calls that commute with a sum over `dims`, to a root that
    `accepts(root, dims)`; else None.

    Commuting calls are scaling by a known finite number other than 0, adding or subtracting
    anything, and `unsqueeze`. Every value on the way must have no other use, or it would be
    computed all the same.
    """
    # A value with another reader is computed in any case, and the pushed form would be work on top.
    if not isinstance(node, fx.Node) or not is_tensor(node) or not uses_once(node):
        return None
    dims = tuple(dims)
    # Asked before going further up: the nearest root leaves the fewest steps to rebuild.
    if accepts(node, dims):
        return Path(node, dims)
    for position, inner in _find_inner_operands(node, dims):
        reduction_path = trace(node.args[position], inner, accepts)
        if reduction_path is not None:
            return replace(
                reduction_path,
                steps=(*reduction_path.steps, (node, position)),
                stops=(*reduction_path.stops, dims),
            )
    return None


def _find_inner_operands(node: fx.Node, dims: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Arguments of `node` the reduction may pass to, each with the dims as that argument counts."""
    if is_op(node, aten.unsqueeze.default):
        rank = len(shape(node))
        new = arguments(node)["dim"] % rank
        # The operand does not have the new dim, which has size 1 and needs no sum.
        return [(0, tuple(dim - (dim > new) for dim in dims if dim != new))]
    if is_op(node, *_SCALES):
        factor = 1.0 if is_op(node, aten.neg.default) else scalar(node.args[1])
        # A factor of 0 or infinity turns some values into NaN, and after the sum it would be
        # others.
        is_constant = factor is not None and factor != 0 and math.isfinite(factor)
        return [(0, dims)] if is_constant and _has_same_form(node, node.args[0]) else []
    if is_op(node, *_ADDS) and arguments(node)["alpha"] == 1:
        # The right operand of a subtraction has its sign changed, which the steps do not model.
        places = (0, 1) if is_op(node, aten.add.Tensor) else (0,)
        return [
            (p, dims)
            for p in places
            # A broadcast operand would be counted once instead of for each element.
            if _has_same_form(node, node.args[p]) and _is_addable(node, node.args[1 - p])
        ]
    return []


def _has_same_form(node: fx.Node, part: object) -> bool:
    return is_tensor(part) and shape(part) == shape(node) and dtype(part) == dtype(node)


def _is_addable(node: fx.Node, other: object) -> bool:
    if isinstance(other, (int, float)):
        return True
    return is_tensor(other) and dtype(other) == dtype(node)


def rebuild(graph: fx.Graph, path: Path, value: fx.Node, kind: Kind) -> fx.Node:
    """The reduced root `value` (reduced dims kept as 1) taken through the steps of `path`, at the
    insertion point.
    """
    for (node, position), dims in zip(path.steps, path.stops, strict=True):
        if is_op(node, *_ADDS):
            other = _reduce_other_operand(graph, node.args[1 - position], kind, dims, shape(node))
            value = call(graph, node.target, *((value, other) if position == 0 else (other, value)))
        else:
            value = call(graph, node.target, value, *node.args[1:])
    return value


def _reduce_other_operand(
    graph: fx.Graph, other: Any, kind: Kind, dims: Sequence[int], full: Sequence[int]
) -> Any:
    """What `other`, broadcast to `full`, adds to the reduction over `dims`: only the dims it really
    has are reduced.
    """
    have = shape(other) if isinstance(other, fx.Node) else ()
    # Broadcasting aligns dims at the right.
    shift = len(full) - len(have)
    own_dims = [dim - shift for dim in dims if dim >= shift and have[dim - shift] > 1]
    times = (
        # In a sum a broadcast operand counts once for each element of the dims that it lacks; in a
        # mean once.
        math.prod(full[dim] for dim in dims if dim - shift not in own_dims) if kind == "sum" else 1
    )
    if not isinstance(other, fx.Node):
        return other * times
    value = emit_reduction(graph, kind, other, own_dims, keepdim=True) if own_dims else other
    return value if times == 1 else call(graph, aten.mul.Tensor, value, times)


def emit_reduction(
    graph: fx.Graph, kind: Kind, value: fx.Node, dims: Sequence[int], *, keepdim: bool = False
) -> fx.Node:
    """`kind` of `value` over `dims` (over nothing: `value` itself)."""
    if not dims:
        return value
    return call(
        graph, aten.mean.dim if kind == "mean" else aten.sum.dim_IntList, value, list(dims), keepdim
    )


def finish(graph: fx.Graph, reduction: Reduction, value: fx.Node) -> fx.Node:
    """`value` (reduced dims kept as 1) in the form of `reduction.node`."""
    return (
        value
        if reduction.keepdim or not reduction.dims
        else call(graph, aten.squeeze.dims, value, list(reduction.dims))
    )


def emit_bounds(
    graph: fx.Graph, low: fx.Node, high: fx.Node, dims: Sequence[int], *, keepdim: bool = False
) -> tuple[fx.Node, fx.Node]:
    """Least of `low` and greatest of `high` over `dims`. (Two calls: `aminmax` over a dim is 12
    times slower on CPU.)
    """
    return call(graph, aten.amin.default, low, list(dims), keepdim), call(
        graph, aten.amax.default, high, list(dims), keepdim
    )


def split_signs(graph: fx.Graph, value: fx.Node, low: fx.Node, high: fx.Node) -> fx.Node:
    """The twin of `value`, a sum of numbers from `low` to `high`: `value` where all were above 0 or
    all below, else 0 (see the top of the file).
    """
    # Only then do all products with an infinity have one sign, and their sum is no NaN.
    one_signed = call(
        graph,
        aten.logical_or.default,
        call(graph, aten.gt.Scalar, low, 0),
        call(graph, aten.lt.Scalar, high, 0),
    )
    return call(graph, aten.where.ScalarOther, one_signed, value, 0)


def choose(graph: fx.Graph, product: fx.Node, twin: fx.Node) -> fx.Node:
    """The product of the sum, with NaN where its twin found that an infinity met summands of both
    signs.
    """
    # Finite values never make a NaN in the twin, so they pass unchanged.
    return call(graph, aten.where.self, call(graph, aten.isnan.default, twin), twin, product)
