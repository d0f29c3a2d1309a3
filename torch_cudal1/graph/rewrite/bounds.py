"""Bounds on what each node can hold, whatever the inputs are: an interval, and whether NaN is
possible.

A bound says: each element is NaN (only if `nan`) or lies in `[low, high]`, in the arithmetic of its
dtype, rounding included. Ops that are not listed are unbounded. Nothing is changed here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite.alias import VIEWS
from torch_cudal1.graph.rewrite.clamp_rules import clamp_limits
from torch_cudal1.graph.rewrite.match import arguments, dtype, is_op, is_tensor, scalar, shape

__all__ = ["Bounds", "compute_bounds"]

aten = torch.ops.aten
_LARGEST_EXACT = 2**53  # limits are kept as Python floats


@dataclass(frozen=True)
class Bounds:
    """`[low, high]`, and whether an element may be NaN instead."""

    low: float
    high: float
    nan: bool

    @property
    def point(self) -> float | None:
        """The only possible value apart from NaN, if there is one and it is finite."""
        return self.low if self.low == self.high and math.isfinite(self.low) else None

    @property
    def finite(self) -> bool:
        """Neither NaN nor infinite."""
        return not self.nan and math.isfinite(self.low) and math.isfinite(self.high)


def compute_bounds(graph: fx.Graph) -> Mapping[fx.Node, Bounds]:
    """The bounds of every node that holds a real tensor, in one forward pass."""
    bounds: dict[fx.Node, Bounds] = {}
    for node in graph.nodes:
        if (
            is_tensor(node)
            and not dtype(node).is_complex
            and node.op in ("placeholder", "get_attr", "call_function")
        ):
            node_bounds = (
                _call(node, bounds)
                if node.op == "call_function"
                else _make_widest_bounds(dtype(node))
            )
            bounds[node] = _clip_to_dtype(node_bounds, dtype(node))
    return bounds


def _make_widest_bounds(kind: torch.dtype) -> Bounds:
    if kind == torch.bool:
        # False and True.
        return Bounds(0, 1, False)
    return Bounds(-math.inf, math.inf, kind.is_floating_point)


def _clip_to_dtype(bounds: Bounds, kind: torch.dtype) -> Bounds:
    if kind == torch.bool:
        return Bounds(max(bounds.low, 0), min(bounds.high, 1), False)
    # Integers have no NaN, whatever a rule could not rule out.
    return bounds if kind.is_floating_point else replace(bounds, nan=False)


def _call(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds:
    unknown = _make_widest_bounds(dtype(node))
    number = scalar(node)
    if number is not None:
        return _bound_number(number)
    if not dtype(node).is_floating_point and not is_op(node, *_COMPARISONS, *_MOVES, *_FACTORIES):
        return unknown  # integers wrap around
    if node.target is operator.getitem:
        return _item(node, bounds)
    for ops, rule in _RULES:
        if is_op(node, *ops):
            return rule(node, bounds) or unknown
    return unknown


def _bound_number(number: float) -> Bounds:
    if math.isnan(number) or (isinstance(number, int) and abs(number) > _LARGEST_EXACT):
        # Larger integers are no exact Python floats.
        return Bounds(-math.inf, math.inf, True)
    return Bounds(float(number), float(number), False)


def _bound_argument(arg: Any, bounds: Mapping[fx.Node, Bounds]) -> Bounds:
    if isinstance(arg, fx.Node):
        # Anything unknown is unbounded: a bound that is too wide is safe.
        return bounds.get(arg, Bounds(-math.inf, math.inf, True))
    return (
        _bound_number(arg)
        if isinstance(arg, (bool, int, float))
        else Bounds(-math.inf, math.inf, True)
    )


def _unite_bounds(parts: list[Bounds]) -> Bounds:
    return Bounds(min(p.low for p in parts), max(p.high for p in parts), any(p.nan for p in parts))


# --- rules by op; each takes the node and what is known of earlier nodes ---

_COMPARISONS = (aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar)
_FACTORIES = (
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.zeros_like.default,
    aten.ones_like.default,
)
_MOVES = (
    *VIEWS,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.amax.default,
    aten.amin.default,
    aten.flip.default,
    aten.roll.default,
    aten.repeat.default,
    aten.gather.default,
    aten.index_select.default,
    aten.max.default,
    aten.min.default,
)


def _factory(node: fx.Node, _bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    name = str(node.target)
    if "full" in name:
        filled = arguments(node)["fill_value"]
        # The fill value may be complex or symbolic.
        edge = _bound_number(filled) if isinstance(filled, (bool, int, float)) else None
        return (
            edge
            if edge is None or edge.nan
            else _round_outwards(edge.low, edge.high, dtype(node), exact=True)
        )
    return _bound_number(0.0 if "zeros" in name else 1.0)


def _bound_view(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    return (
        _bound_argument(node.args[0], bounds)
        if is_tensor(node.args[0]) and dtype(node.args[0]) == dtype(node)
        else None
    )


def _cast(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    if dtype(node).itemsize < 2:  # 8-bit floats saturate or turn into NaN, each in its own way
        return None
    x = _bound_argument(node.args[0], bounds)
    edge = _round_outwards(x.low, x.high, dtype(node), exact=True)
    return replace(edge, nan=x.nan)


def _bound_concatenation(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    pieces = node.args[0]
    return (
        _unite_bounds([_bound_argument(piece, bounds) for piece in pieces])
        if isinstance(pieces, (list, tuple)) and pieces
        else None
    )


def _bound_padding(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    return _unite_bounds(
        [
            _bound_argument(node.args[0], bounds),
            _bound_argument(node.args[2] if len(node.args) > 2 else 0, bounds),
        ]
    )


def _bound_selection(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    if is_op(node, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        return _unite_bounds(
            [_bound_argument(node.args[0], bounds), _bound_argument(node.args[2], bounds)]
        )
    return _unite_bounds(
        [_bound_argument(node.args[1], bounds), _bound_argument(node.args[2], bounds)]
    )


def _triangle(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    return _unite_bounds([_bound_argument(node.args[0], bounds), _bound_number(0.0)])


def _bound_clamp(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    limits, x = clamp_limits(node), _bound_argument(node.args[0], bounds)
    if limits is None:
        return None
    edge = _round_outwards(*limits, dtype(node), exact=True)
    return Bounds(
        min(max(x.low, edge.low), edge.high), max(min(x.high, edge.high), edge.low), x.nan
    )


def _extreme(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    a, b = _bound_argument(node.args[0], bounds), _bound_argument(node.args[1], bounds)
    pick = min if is_op(node, aten.minimum.default) else max
    return Bounds(pick(a.low, b.low), pick(a.high, b.high), a.nan or b.nan)


def _make_fixed_rule(
    low: float, high: float, *, needs_finite: bool = False
) -> Callable[[fx.Node, Mapping[fx.Node, Bounds]], Bounds]:
    """An op with values in `[low, high]`, NaN for NaN (and with `needs_finite` for infinity)."""

    def rule(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds:
        x = _bound_argument(node.args[0], bounds)
        return Bounds(low, high, x.nan or (needs_finite and not x.finite))

    return rule


def _softmax(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    source, dim = node.args[0], node.args[1]
    alone = (
        is_tensor(source)
        and isinstance(dim, int)
        and (not shape(source) or shape(source)[dim] == 1)
    )
    low, high = (0.0, 1.0) if is_op(node, aten._softmax.default) else (-math.inf, 0.0)
    return Bounds(high if alone else low, high, not _bound_argument(source, bounds).finite)


def _absolute(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    x = _bound_argument(node.args[0], bounds)
    low = 0.0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high))
    return Bounds(low, max(abs(x.low), abs(x.high)), x.nan)


def _bound_negation(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    x = _bound_argument(node.args[0], bounds)
    return Bounds(-x.high, -x.low, x.nan)


def _bound_signed_mean(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    """Sums and means of values of one sign keep that sign. Their size is left open, because it
    depends on rounding.
    """
    x = _bound_argument(node.args[0], bounds)
    if not is_tensor(node.args[0]) or 0 in shape(node.args[0]):  # the mean of nothing is NaN
        return None
    if x.point == 0:
        return Bounds(0.0, 0.0, x.nan)
    return Bounds(
        0.0 if x.low >= 0 else -math.inf,
        0.0 if x.high <= 0 else math.inf,
        # Values of both signs may overflow to infinities of both signs, whose sum is NaN.
        x.nan or not (x.low >= 0 or x.high <= 0),
    )


def _sum(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    a, b = _bound_argument(node.args[0], bounds), _bound_argument(node.args[1], bounds)
    factor = arguments(node).get("alpha", 1)
    # Mixed dtypes promote, and the rounding of the other dtype is not followed here.
    if factor != 1 or (is_tensor(node.args[1]) and dtype(node.args[1]) != dtype(node)):
        return None
    if is_op(node, aten.sub.Tensor):
        if node.args[0] is node.args[1]:
            # `x - x` is 0, or NaN for an infinite x. Interval arithmetic would not see that both
            # are one value.
            return Bounds(0.0, 0.0, not a.finite)
        b = Bounds(-b.high, -b.low, b.nan)
    # Infinity less infinity is NaN.
    clash = (a.high == math.inf and b.low == -math.inf) or (
        a.low == -math.inf and b.high == math.inf
    )
    edge = _round_outwards(
        *_find_extremes([a.low, a.high], [b.low, b.high], operator.add), dtype(node)
    )
    return replace(edge, nan=a.nan or b.nan or clash)


def _product(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    a, b = _bound_argument(node.args[0], bounds), _bound_argument(node.args[1], bounds)
    nan = a.nan or b.nan or _has_zero_times_infinity(a, b)
    if node.args[0] is node.args[1]:
        # A square is never negative, which corners of the interval would not show.
        return Bounds(0.0, math.inf, a.nan)
    edge = _round_outwards(
        *_find_extremes([a.low, a.high], [b.low, b.high], operator.mul), dtype(node)
    )
    return replace(edge, nan=nan)


def _quotient(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    a, divisor = _bound_argument(node.args[0], bounds), scalar(node.args[1])
    # Division by 0 has results of both signs, and NaN.
    if divisor is None or not math.isfinite(divisor) or not divisor:
        return None
    # Kernels may multiply by the reciprocal: widened, except for the sign.
    low, high = sorted((a.low / divisor, a.high / divisor))
    return replace(_widen(low, high, dtype(node)), nan=a.nan)


def _has_zero_times_infinity(a: Bounds, b: Bounds) -> bool:
    return any(x.low <= 0 <= x.high and math.inf in (-y.low, y.high) for x, y in ((a, b), (b, a)))


def _find_extremes(
    first: list[float], second: list[float], op: Callable[[Any, Any], Any]
) -> tuple[Any, Any]:
    """Exact extremes of `op` over the corners, as Fractions where finite; 0 * inf counts as 0, what
    the rest tends to.
    """
    values: list[Any] = []
    for x in first:
        for y in second:
            if math.isfinite(x) and math.isfinite(y):
                # Exact: a Python float would round, perhaps inwards.
                values.append(op(Fraction(x), Fraction(y)))
            elif op is operator.mul and 0 in (x, y):
                values.append(Fraction(0))
            elif op is operator.add and math.isinf(x) and math.isinf(y) and x != y:
                # Opposite infinities may sum to anything in between.
                values += [-math.inf, math.inf]
            else:
                values.append(op(x, y))
    return min(values), max(values)


def _round_outwards(low: Any, high: Any, kind: torch.dtype, *, exact: bool = False) -> Bounds:
    """Limits as the dtype holds them. A limit that the dtype cannot hold moves outwards unless one
    `exact` rounding is meant.
    """
    limits = []
    for value, sign in ((low, -1.0), (high, 1.0)):
        near = (
            # PyTorch's own rounding to the dtype.
            float(torch.tensor(float(value), dtype=torch.float64).to(kind))
            if kind.is_floating_point
            else float(value)
        )
        if exact or near == value:
            limits.append(near)
        else:
            limits.append(_move_outwards(float(value), kind, sign))
    return Bounds(limits[0], limits[1], False)


def _widen(low: float, high: float, kind: torch.dtype) -> Bounds:
    return Bounds(_move_outwards(low, kind, -1.0), _move_outwards(high, kind, 1.0), False)


def _move_outwards(value: float, kind: torch.dtype, sign: float) -> float:
    info = torch.finfo(kind)
    if not value or not math.isfinite(value):
        return value
    # Kernels may flush subnormals, or round an intermediate once more.
    moved = value + sign * (4 * info.eps * abs(value) + info.smallest_normal)
    # Rounding never crosses zero, and what overflows the dtype is infinite in it.
    moved = max(moved, 0.0) if value > 0 else min(moved, 0.0)
    return math.copysign(math.inf, moved) if abs(moved) > info.max else moved


_SELECTIONS = (
    aten.max.dim,
    aten.min.dim,
    aten.sort.default,
    aten.topk.default,
    aten.max_pool2d_with_indices.default,
)
_PIECES = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int)


def _item(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds:
    source, which = node.args[0], node.args[1]
    unknown = _make_widest_bounds(dtype(node))
    if not isinstance(source, fx.Node) or not source.args or not is_tensor(source.args[0]):
        return unknown
    x = _bound_argument(source.args[0], bounds)
    if which == 0 and is_op(
        source,
        aten.max.dim,
        aten.min.dim,
        aten.sort.default,
        aten.topk.default,
        aten.max_pool2d_with_indices.default,
    ):
        return x
    if is_op(
        source,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.unbind.int,
    ):
        return x
    if is_op(source, aten.native_dropout.default) and which == 0:
        p = source.args[1]
        # Dropout scales what it keeps, so values may grow beyond the bounds of its input.
        scale = 1.0 / (1.0 - float(p)) if isinstance(p, (int, float)) and p < 1 else math.inf
        if x.point == 0 and math.isfinite(scale):
            return x
        return Bounds(
            0.0 if x.low >= 0 else -math.inf,
            0.0 if x.high <= 0 else math.inf,
            not x.finite or scale == math.inf,
        )
    return unknown


def _bound_comparison(node: fx.Node, bounds: Mapping[fx.Node, Bounds]) -> Bounds | None:
    """A comparison with NaN is False. So False is certain even where NaN is possible, and True is
    not.
    """
    x, limit = _bound_argument(node.args[0], bounds), node.args[1]
    source = node.args[0]
    if (
        not isinstance(limit, (int, float))
        or not is_tensor(source)
        or not dtype(source).is_floating_point
    ):
        return None
    rounded_limit = float(torch.tensor(limit, dtype=torch.float64).to(dtype(source)))
    # Kernels compare half types in different precisions.
    if rounded_limit != limit and dtype(source).itemsize < 4:
        return None
    limit = rounded_limit
    always, never = {
        aten.gt.Scalar: (x.low > limit, x.high <= limit),
        aten.ge.Scalar: (x.low >= limit, x.high < limit),
        aten.lt.Scalar: (x.high < limit, x.low >= limit),
        aten.le.Scalar: (x.high <= limit, x.low > limit),
    }[node.target]  # type: ignore[index]
    if never:
        return Bounds(0.0, 0.0, False)
    return Bounds(1.0, 1.0, False) if always and not x.nan else None


_RULES: tuple[
    tuple[tuple[Any, ...], Callable[[fx.Node, Mapping[fx.Node, Bounds]], Bounds | None]], ...
] = (
    (_FACTORIES, _factory),
    (_MOVES, _bound_view),
    ((aten._to_copy.default,), _cast),
    ((aten.cat.default, aten.stack.default), _bound_concatenation),
    ((aten.constant_pad_nd.default,), _bound_padding),
    ((aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor), _bound_selection),
    ((aten.tril.default, aten.triu.default), _triangle),
    (
        (
            aten.relu.default,
            aten.clamp.default,
            aten.hardtanh.default,
            aten.clamp_min.default,
            aten.clamp_max.default,
        ),
        _bound_clamp,
    ),
    ((aten.minimum.default, aten.maximum.default), _extreme),
    ((aten.sigmoid.default, aten.hardsigmoid.default), _make_fixed_rule(0.0, 1.0)),
    ((aten.tanh.default, aten.erf.default), _make_fixed_rule(-1.0, 1.0)),
    ((aten.sin.default, aten.cos.default), _make_fixed_rule(-1.0, 1.0, needs_finite=True)),
    ((aten.exp.default, aten.softplus.default), _make_fixed_rule(0.0, math.inf)),
    ((aten._softmax.default, aten._log_softmax.default), _softmax),
    ((aten._safe_softmax.default,), _make_fixed_rule(0.0, 1.0, needs_finite=True)),
    ((aten.abs.default,), _absolute),
    ((aten.neg.default,), _bound_negation),
    (
        (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
        _bound_signed_mean,
    ),
    ((aten.add.Tensor, aten.sub.Tensor), _sum),
    ((aten.mul.Tensor,), _product),
    ((aten.div.Tensor,), _quotient),
    (_COMPARISONS, _bound_comparison),
)
