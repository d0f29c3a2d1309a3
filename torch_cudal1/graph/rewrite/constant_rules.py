"""Rules for constants: values that no input changes, and limits that no value reaches.

What holds for NaN and infinity too runs always. What only finite inputs make constant (`x - x`,
`min(x, 0)` clamped to [0, 1]) runs under `assume_finite`. Random draws that feed a constant are
still drawn.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

import torch
import torch.fx as fx
from torch._ops import OpOverload

from torch_cudal1.graph.rewrite.alias import may_stand_for
from torch_cudal1.graph.rewrite.bounds import Bounds, compute_bounds
from torch_cudal1.graph.rewrite.clamp_rules import clamp_limits
from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    dtype,
    emit_strided_copy,
    is_op,
    is_tensor,
    iter_calls,
    replace,
    scalar,
    shape,
    strides,
    val,
)
from torch_cudal1.graph.rewrite.rule import Rule

__all__ = ["CONSTANT_RULES"]

aten = torch.ops.aten
_SOURCES = (aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default)
# Bounds the work for one node.
_MAX_EVALUATED_ARGS = 8


def constant_value(gm: fx.GraphModule) -> int:
    """A node that is one number for every input, NaN and infinity included -> `full(number)`.

    For instance `clamp(sigmoid(x), 2, 3)` of an x that cannot be NaN, `sigmoid(x) > 2`, or `exp` of
    a `full`.
    """
    return _fold(gm, finite=False)


def constant_value_finite(gm: fx.GraphModule) -> int:
    """A node that is one number for every *finite* input -> `full(number)`.

    `x * 0`, `x - x`, softmax over one element, `clamp(min(x, 0), 0, 1)`, and what is computed from
    those. NaN went through before.
    """
    return _fold(gm, finite=True)


def _fold(gm: fx.GraphModule, *, finite: bool) -> int:
    # Once for the pass: a folded node keeps its value, so the bounds stay right.
    bounds = compute_bounds(gm.graph)
    sites = 0
    for node in iter_calls(gm):
        if (
            node not in bounds
            # They are constants already: folding one again would change nothing.
            or is_op(node, *_SOURCES, aten.lift_fresh_copy.default)
            or not val(node).numel()
        ):
            continue
        point = bounds[node].point if finite or not bounds[node].nan else None
        point = _evaluate(node, bounds, finite=finite) if point is None else point
        # `emit_strided_copy` makes such a copy below, so folding it would repeat itself.
        if point is None or _only_moves_a_constant(node):
            continue
        with gm.graph.inserting_before(node):
            number = (
                point
                # `full` takes a number of the dtype's own kind.
                if dtype(node).is_floating_point
                else (bool(point) if dtype(node) == torch.bool else int(point))
            )
            new = call(
                gm.graph,
                aten.full.default,
                list(shape(node)),
                number,
                dtype=dtype(node),
                device=val(node).device,
            )
            laid = (
                new
                if strides(new) == strides(node)
                else emit_strided_copy(gm.graph, new, shape(node), strides(node))
            )
        if laid is not None:
            replace(node, laid)
            sites += 1
    return sites


def _only_moves_a_constant(node: fx.Node) -> bool:
    """Whether folding would only restate a copy that `emit_strided_copy` made."""
    return is_op(
        node, aten.clone.default, aten.permute.default, aten.as_strided.default
    ) and _is_laid_out_constant(node)


def _is_laid_out_constant(node: fx.Node) -> bool:
    while is_op(node, aten.clone.default, aten.permute.default, aten.as_strided.default):
        node = node.args[0]  # type: ignore[assignment]
    return is_op(node, *_SOURCES)


def _evaluate(node: fx.Node, bounds: Mapping[fx.Node, Bounds], *, finite: bool) -> float | None:
    """The value of a pointwise call whose tensors are all single numbers, computed on one element
    of the same dtypes.
    """
    if (
        not isinstance(node.target, OpOverload)
        or torch.Tag.pointwise not in node.target.tags
        # A cast may go to another device.
        or is_op(node, aten._to_copy.default)
    ):
        return None
    sources = node.all_input_nodes
    # Random draws have a bound and no value.
    if not sources or len(sources) > _MAX_EVALUATED_ARGS or node.is_impure(impure_random=True):
        return None
    points = {}
    for source in sources:
        source_bounds = bounds.get(source)
        if (
            source_bounds is None
            or source_bounds.point is None
            or (source_bounds.nan and not finite)
        ):
            return None
        # One element in the same dtypes, on the CPU: PyTorch itself computes the constant. 0-dim
        # tensors stay 0-dim, because they promote differently.
        points[source] = torch.full(
            (1,) * min(1, len(shape(source))), source_bounds.point, dtype=dtype(source)
        )
    args, kwargs = fx.map_arg((node.args, node.kwargs), points.__getitem__)
    value = node.target(*args, **kwargs)
    number = float(value.reshape(-1)[0])
    # Beyond 2^53 a float is no exact integer.
    return number if math.isfinite(number) and abs(number) < 2**53 else None


def bound_that_never_bites(gm: fx.GraphModule) -> int:
    """`relu(sigmoid(x))`, `clamp(tanh(x), -1, 1)`, `minimum(sigmoid(x), 2)`, ... -> the inner
    value.

    Valid when the interval of the argument lies inside the limits; NaN passes both ways, so for
    every input.
    """
    bounds = compute_bounds(gm.graph)
    sites = 0
    for node in iter_calls(gm):
        limits = _read_limits(node)
        source = node.args[0] if limits else None
        if (
            limits is None
            or not is_tensor(source)
            or source not in bounds
            or not dtype(source).is_floating_point
        ):
            continue
        inside = limits[0] <= bounds[source].low and bounds[source].high <= limits[1]
        # The clamp may also be what makes an output fresh.
        if inside and may_stand_for(source, node):
            replace(node, source)
            sites += 1
    return sites


def _read_limits(node: fx.Node) -> tuple[float, float] | None:
    if is_op(node, aten.minimum.default, aten.maximum.default):
        number = scalar(node.args[1])
        if number is None or math.isnan(number):
            return None
        return (-math.inf, number) if is_op(node, aten.minimum.default) else (number, math.inf)
    limits = clamp_limits(node)
    if limits is None:
        return None
    # The limits as the dtype holds them: 0.1 in bfloat16 is not 0.1.
    low, high = (
        float(torch.tensor(limit, dtype=torch.float64).to(dtype(node))) for limit in limits
    )
    return low, high


def norm_of_one(gm: fx.GraphModule) -> int:
    """Layer, group or instance norm over a single element -> its bias (0 without one):
    `x - mean(x)` is 0 for finite x.

    Valid for eps > 0 and when mean and deviation are not asked for (they are saved for backward).
    """
    sites = 0
    for node in iter_calls(gm, aten.native_layer_norm.default, aten.native_group_norm.default):
        items = list(node.users)
        if len(items) != 1 or items[0].target is not operator.getitem or items[0].args[1] != 0:
            continue
        bound, item = arguments(node), items[0]
        # With eps 0 the norm of a single element is 0 / 0.
        if bound["eps"] <= 0 or not val(item).numel() or _count_elements_per_mean(node) != 1:
            continue
        with gm.graph.inserting_before(item):
            new = call(
                gm.graph,
                aten.full.default,
                list(shape(item)),
                0.0,
                dtype=dtype(item),
                device=val(item).device,
            )
            bias = bound["bias"]
            if bias is not None:
                # A group norm's bias runs along dim 1.
                channels = [1, -1] + [1] * (len(shape(item)) - 2)
                bias = (
                    call(gm.graph, aten.view.default, bias, channels)
                    if is_op(node, aten.native_group_norm.default)
                    else bias
                )
                new = call(gm.graph, aten.add.Tensor, new, bias)
            if dtype(new) != dtype(item):
                new = call(gm.graph, aten._to_copy.default, new, dtype=dtype(item))
            laid = (
                new
                if strides(new) == strides(item)
                else emit_strided_copy(gm.graph, new, shape(item), strides(item))
            )
        if laid is not None:
            replace(item, laid)
            sites += 1
    return sites


def _count_elements_per_mean(node: fx.Node) -> int:
    bound = arguments(node)
    if is_op(node, aten.native_layer_norm.default):
        return math.prod(bound["normalized_shape"])
    return int(bound["C"]) * int(bound["HxW"]) // int(bound["group"])


CONSTANT_RULES = (
    Rule("bound_that_never_bites", bound_that_never_bites),
    Rule("constant_value", constant_value),
    Rule("constant_value_finite", constant_value_finite, finite_only=True),
    Rule("norm_of_one", norm_of_one, finite_only=True),
)
