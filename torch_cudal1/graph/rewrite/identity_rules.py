"""Rules that remove what changes nothing: no-op arithmetic, views, casts, copies, repetitions, dead
code.

They hold bit for bit for every input, NaN and infinity included (`add_zero` is the exception and
says so). Random draws stay: dropout with p=0 in training is kept, because removing it would shift
the generator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite.alias import VIEWS, escapes, may_stand_for, same_geometry
from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    calls,
    dtype,
    is_dead_when_unused,
    is_op,
    is_output,
    is_tensor,
    replace,
    scalar,
    shape,
    strides,
    val,
)
from torch_cudal1.graph.rewrite.rule import Rule

__all__ = ["IDENTITY_RULES", "clamp_limits"]

aten = torch.ops.aten


def dead_code(gm: fx.GraphModule) -> int:
    """Nodes nobody uses -> nothing. Random and mutating calls stay."""
    sites = 0
    for node in reversed(list(gm.graph.nodes)):
        if (
            not node.users
            and node.op in ("call_function", "get_attr")
            and is_dead_when_unused(node)
        ):
            gm.graph.erase_node(node)
            sites += 1
    return sites


def redundant_view(gm: fx.GraphModule) -> int:
    """`permute(permute(x))`, `view(x)`, `expand(x)`, `slice(x)` ... that end where they began ->
    `x`.

    Valid when shape, strides and offset equal those of a tensor earlier in the chain of views: then
    it is the same elements of the same storage. A view that is an output stays: the wrapper around
    the graph expects that node.
    """
    sites = 0
    for node in calls(gm, *VIEWS):
        if is_output(node):
            continue
        found, earlier = None, node
        while is_op(earlier, *VIEWS):
            earlier = earlier.args[0]  # type: ignore[assignment]
            found = earlier if is_tensor(earlier) and same_geometry(node, earlier) else found
        if found is not None:
            replace(node, found)
            sites += 1
    return sites


def redundant_copy(gm: fx.GraphModule) -> int:
    """`clone(x)` or a `_to_copy(x)` to where and what `x` is already -> `x`.

    Valid when dtype, device and strides are equal, unless it is the copy that makes an output
    fresh. (Eval-mode dropout is captured as such a clone.)
    """
    sites = 0
    for node in calls(gm, aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default):
        source = node.args[0]
        if isinstance(source, fx.Node) and source.op != "get_attr" and may_stand_for(source, node):
            replace(node, source)
            sites += 1
    return sites


def cast_chain(gm: fx.GraphModule) -> int:
    """`_to_copy(_to_copy(x, wide), final)` -> `_to_copy(x, final)`, which `redundant_copy` drops if
    `x` is of that dtype.

    Valid when the first cast loses nothing (float32 -> float64, bool -> anything): the second then
    rounds the same values. Not for a float turned into an integer, where out-of-range values are
    undefined in different ways.
    """
    sites = 0
    for node in calls(gm, aten._to_copy.default):
        first = node.args[0]
        if not is_op(first, aten._to_copy.default) or not (
            _plain_cast(node) and _plain_cast(first)
        ):
            continue
        source = first.args[0]
        if (
            not is_tensor(source)
            or not _lossless(dtype(source), dtype(first))
            or strides(source) != strides(first)
        ):
            continue
        if dtype(source).is_floating_point and not dtype(node).is_floating_point:
            continue
        with gm.graph.inserting_before(node):
            replace(node, call(gm.graph, aten._to_copy.default, source, dtype=dtype(node)))
        sites += 1
    return sites


def _plain_cast(node: fx.Node) -> bool:
    source = node.args[0]
    if not is_tensor(source) or val(source).device != val(node).device:
        return False
    bound = arguments(node)
    return not bound["pin_memory"] and bound["layout"] in (None, val(source).layout)


def _lossless(narrow: torch.dtype, wide: torch.dtype) -> bool:
    if narrow.is_complex or wide.is_complex or wide == torch.bool:
        return narrow == wide
    if narrow == torch.bool or narrow == wide:
        return True
    if narrow.is_floating_point:
        if not wide.is_floating_point or narrow.itemsize < 2 or wide.itemsize < 2:
            return False
        small, large = torch.finfo(narrow), torch.finfo(wide)
        # The smallest subnormal must exist in the wider format as well.
        tiny = small.smallest_normal * small.eps >= large.smallest_normal * large.eps
        return small.max <= large.max and small.eps >= large.eps and tiny
    digits = torch.iinfo(narrow).max
    if wide.is_floating_point:
        return digits < 2 / torch.finfo(wide).eps and digits < torch.finfo(wide).max
    return torch.iinfo(wide).max >= digits and torch.iinfo(wide).min <= torch.iinfo(narrow).min


def dropout_off(gm: fx.GraphModule) -> int:
    """`native_dropout(x, p, train=False)` -> `(x, ones)`."""
    sites = 0
    for node in calls(gm, aten.native_dropout.default):
        source = node.args[0]
        if node.args[2] is not False or not users_only_items(node):
            continue
        for item in list(node.users):
            if item.args[1] == 0 and is_tensor(source) and may_stand_for(source, item):
                replace(item, source)
                sites += 1
            elif item.args[1] == 1:
                with gm.graph.inserting_before(item):
                    held = val(item)
                    replace(
                        item,
                        call(
                            gm.graph,
                            aten.full.default,
                            shape(item),
                            True,
                            dtype=held.dtype,
                            device=held.device,
                        ),
                    )
                sites += 1
    return sites


def users_only_items(node: fx.Node) -> bool:
    """Whether a tuple is only ever taken apart."""
    return all(
        user.op == "call_function" and user.target is operator.getitem for user in node.users
    )


def no_op_arithmetic(gm: fx.GraphModule) -> int:
    """`x - 0`, `x * 1`, `x / 1`, `x ** 1`, and `x + 0` for integers -> `x`.

    Exact, signs of zero included: `-0.0 - 0 = -0.0`, while `-0.0 + 0 = +0.0` (see `add_zero`).
    Valid when neither dtype nor shape nor strides change.
    """
    return _drop(gm, _neutral)


def add_zero(gm: fx.GraphModule) -> int:
    """`x + 0` -> `x` for floats, for finite values only.

    It can turn `+0.0` into `-0.0`, which shows where a quotient by it is infinite.
    """
    return _drop(
        gm,
        lambda node: (
            node.args[0] if is_op(node, aten.add.Tensor) and _is_zero(node.args[1]) else None
        ),
    )


def _drop(gm: fx.GraphModule, neutral: Callable[[fx.Node], Any]) -> int:
    sites = 0
    for node in calls(gm):
        source = neutral(node)
        if isinstance(source, fx.Node) and may_stand_for(source, node):
            replace(node, source)
            sites += 1
    return sites


def _is_zero(arg: object) -> bool:
    number = scalar(arg)
    return number is not None and number == 0


def _neutral(node: fx.Node) -> Any:
    """The operand that a call returns unchanged, or None."""
    if is_op(node, aten.mul.Tensor):
        for this, other in ((0, 1), (1, 0)):
            if scalar(node.args[other]) == 1:
                return node.args[this]
    if (
        is_op(node, aten.div.Tensor, aten.pow.Tensor_Scalar, aten.mul.Scalar, aten.div.Scalar)
        and scalar(node.args[1]) == 1
    ):
        return node.args[0]
    if is_op(node, aten.sub.Tensor):
        number = scalar(node.args[1])
        return node.args[0] if number == 0 and math.copysign(1.0, number) > 0 else None
    if (
        is_op(node, aten.add.Tensor)
        and _is_zero(node.args[1])
        and not dtype(node).is_floating_point
        and not dtype(node).is_complex
    ):
        return node.args[0]
    return None


_INVOLUTIONS = (aten.neg.default, aten.bitwise_not.default)
_IDEMPOTENT = (
    aten.relu.default,
    aten.abs.default,
    aten.floor.default,
    aten.ceil.default,
    aten.round.default,
    aten.trunc.default,
    aten.sign.default,
    aten.tril.default,
    aten.triu.default,
    aten.nan_to_num.default,
)


def double_inverse(gm: fx.GraphModule) -> int:
    """`-(-x)` and `~~x` -> `x`, and `not not x` -> `x` for bool."""

    def inner(node: fx.Node) -> Any:
        involution = is_op(node, *_INVOLUTIONS) or (
            is_op(node, aten.logical_not.default) and _is_bool(node.args[0], 2)
        )
        first = node.args[0] if involution else None
        return (
            first.args[0]
            if isinstance(first, fx.Node)
            and first.op == "call_function"
            and first.target == node.target
            else None
        )

    return _drop(gm, inner)


def _is_bool(node: object, depth: int) -> bool:
    for _ in range(depth):
        if not is_tensor(node) or dtype(node) != torch.bool:
            return False
        node = node.args[0] if node.args else None
    return True


def repeated(gm: fx.GraphModule) -> int:
    """`f(f(x))` -> `f(x)` for idempotent `f` (relu, abs, floor, round, tril ...) with equal further
    arguments.
    """

    def inner(node: fx.Node) -> Any:
        first = node.args[0] if is_op(node, *_IDEMPOTENT) else None
        equal = (
            is_op(first, node.target)  # type: ignore[arg-type]
            and first.args[1:] == node.args[1:]
            and first.kwargs == node.kwargs
        )
        return first if equal else None

    return _drop(gm, inner)


_CLAMPS = (
    aten.relu.default,
    aten.clamp.default,
    aten.hardtanh.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
)


def clamp_limits(node: fx.Node) -> tuple[float, float] | None:
    """`(low, high)` of a clamp by constants (relu and hardtanh among them), infinite where open;
    None if it is no such thing.
    """
    if not is_op(node, *_CLAMPS):
        return None
    bound = arguments(node)
    if is_op(node, aten.relu.default):
        return 0.0, math.inf
    if is_op(node, aten.hardtanh.default):
        low, high = bound["min_val"], bound["max_val"]
    else:
        low, high = bound.get("min"), bound.get("max")
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    return (low, high) if low <= high else None  # False for NaN limits as well


def clamp_of_clamp(gm: fx.GraphModule) -> int:
    """`clamp(clamp(x, a, b), c, d)` -> `clamp(x, a', b')` with `a'`, `b'` the limits `a`, `b`
    clamped to `[c, d]`.

    Exact: both are monotone, and NaN passes both. Valid for float32 and float64, and where the
    limits are exact in the dtype.
    """
    sites = 0
    for node in calls(gm, *_CLAMPS):
        first = node.args[0]
        if not is_op(first, *_CLAMPS) or not is_tensor(first.args[0]):
            continue
        outer, within, source = clamp_limits(node), clamp_limits(first), first.args[0]
        if (
            outer is None
            or within is None
            or not dtype(source) == dtype(first) == dtype(node)
            or not dtype(node).is_floating_point
        ):
            continue
        low, high = (min(max(limit, outer[0]), outer[1]) for limit in within)
        if not all(_exact_in(limit, dtype(node)) for limit in (*outer, *within)):
            continue
        with gm.graph.inserting_before(node):
            limits = [None if math.isinf(limit) else limit for limit in (low, high)]
            if limits == [None, None] or math.inf in (low, -high):
                continue
            replace(node, call(gm.graph, aten.clamp.default, source, *limits))
        sites += 1
    return sites


def _exact_in(limit: float, kind: torch.dtype) -> bool:
    return kind in (torch.float32, torch.float64) or float(torch.tensor(limit, dtype=kind)) == limit


def trivial_cat(gm: fx.GraphModule) -> int:
    """`cat([x])` -> `x`, and pieces of length 0 go."""
    sites = 0
    for node in calls(gm, aten.cat.default):
        pieces = [piece for piece in node.args[0] if not is_tensor(piece) or val(piece).numel()]  # type: ignore[union-attr]
        if len(pieces) == 1 and is_tensor(pieces[0]) and may_stand_for(pieces[0], node):
            replace(node, pieces[0])
            sites += 1
        elif 0 < len(pieces) < len(node.args[0]) and all(dtype(p) == dtype(node) for p in pieces):  # type: ignore[arg-type]
            node.args = (pieces, *node.args[1:])
            sites += 1
    return sites


def reduction_of_one(gm: fx.GraphModule) -> int:
    """`sum`, `mean`, `logsumexp` over dims of size 1 -> `x + 0`, reshaped; `amax`, `amin`, `max`,
    `min`, `prod` -> `x`.

    Exact: the sum of one element is `0 + x` and its mean that over 1; `logsumexp` is `x + log(1)`.
    Valid when the dtype stays.
    """
    sites = 0
    for node in calls(gm, *_REDUCTIONS, aten.max.dim, aten.min.dim):
        values = _first_item_only(node) if is_op(node, aten.max.dim, aten.min.dim) else node
        source, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
        if (
            values is None
            or not is_tensor(source)
            or dtype(values) != dtype(source)
            or dims is None
        ):
            continue
        over = dims if isinstance(dims, (list, tuple)) else [dims]
        if not over or any(shape(source)[int(dim)] != 1 for dim in over):  # type: ignore[arg-type]
            continue
        with gm.graph.inserting_before(values):
            new = (
                source
                if shape(source) == shape(values)
                else call(gm.graph, aten.squeeze.dims, source, list(over))
            )
            replace(values, _as_reduced(gm.graph, new, values, add=node.target in _SUMS))
        sites += 1
    return sites


def _as_reduced(graph: fx.Graph, new: fx.Node, values: fx.Node, *, add: bool) -> fx.Node:
    if add:
        new = call(graph, aten.add.Tensor, new, 0)
    if strides(new) != strides(values) or (escapes(values) and not add):
        new = call(graph, aten.clone.default, new, memory_format=torch.contiguous_format)
    return new


_SUMS = (aten.sum.dim_IntList, aten.mean.dim, aten.logsumexp.default)
_REDUCTIONS = (*_SUMS, aten.amax.default, aten.amin.default, aten.prod.dim_int)


def _first_item_only(node: fx.Node) -> fx.Node | None:
    items = list(node.users)
    return (
        items[0]
        if len(items) == 1 and items[0].target is operator.getitem and items[0].args[1] == 0
        else None
    )


def common_subexpression(gm: fx.GraphModule) -> int:
    """Two equal calls with equal arguments -> one.

    Not for random, mutating or uninitialised results, nor for two that both reach an output (the
    outputs would alias).
    """
    seen: dict[Any, fx.Node] = {}
    sites = 0
    for node in list(gm.graph.nodes):
        if node.op not in ("call_function", "get_attr") or not node.users or not _repeatable(node):
            continue
        key = (node.op, node.target, _key(node.args), _key(node.kwargs))
        first = seen.setdefault(key, node)
        if first is node or (escapes(first) and escapes(node)):
            continue
        replace(node, first)
        sites += 1
    return sites


def _repeatable(node: fx.Node) -> bool:
    if node.op == "call_function" and "empty" in str(node.target):
        return False
    return not node.is_impure(impure_random=True)


def _key(arg: Any) -> Any:
    """Hashable, and different for 1, 1.0 and True, for 0.0 and -0.0; equal for NaN and NaN."""
    if isinstance(arg, fx.Node):
        return arg
    if isinstance(arg, (list, tuple)):
        return tuple(_key(item) for item in arg)
    if isinstance(arg, dict):
        return tuple((name, _key(item)) for name, item in sorted(arg.items()))
    return type(arg), repr(arg)


IDENTITY_RULES = (
    Rule("dead_code", dead_code),
    Rule("redundant_view", redundant_view),
    Rule("redundant_copy", redundant_copy),
    Rule("cast_chain", cast_chain),
    Rule("dropout_off", dropout_off),
    Rule("no_op_arithmetic", no_op_arithmetic),
    Rule("add_zero", add_zero, finite_only=True),
    Rule("double_inverse", double_inverse),
    Rule("repeated", repeated),
    Rule("clamp_of_clamp", clamp_of_clamp),
    Rule("trivial_cat", trivial_cat),
    Rule("reduction_of_one", reduction_of_one),
    Rule("common_subexpression", common_subexpression),
)
