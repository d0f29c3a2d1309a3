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

from torch_cudal1.graph.rewrite.alias import may_stand_for, reaches_output
from torch_cudal1.graph.rewrite.clamp_rules import clamp_of_clamp
from torch_cudal1.graph.rewrite.copy_rules import (
    cast_chain,
    dropout_off,
    redundant_copy,
    redundant_view,
)
from torch_cudal1.graph.rewrite.match import (
    call,
    dtype,
    is_dead_when_unused,
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

__all__ = ["IDENTITY_RULES"]

aten = torch.ops.aten


def dead_code(gm: fx.GraphModule) -> int:
    """Nodes without users -> nothing. Random and mutating calls stay."""
    sites = 0
    # From the end, so that a chain of dead nodes goes in one pass.
    for node in reversed(list(gm.graph.nodes)):
        if (
            not node.users
            and node.op in ("call_function", "get_attr")
            and is_dead_when_unused(node)
        ):
            gm.graph.erase_node(node)
            sites += 1
    return sites


def no_op_arithmetic(gm: fx.GraphModule) -> int:
    """`x - 0`, `x * 1`, `x / 1`, `x ** 1`, and `x + 0` for integers -> `x`.

    Exact, signs of zero included: `-0.0 - 0 = -0.0`, while `-0.0 + 0 = +0.0` (see `add_zero`).
    Valid when neither dtype nor shape nor strides change.
    """
    return _replace_by_operand(gm, _find_unchanged_operand)


def add_zero(gm: fx.GraphModule) -> int:
    """`x + 0` -> `x` for floats, for finite values only.

    It can turn `+0.0` into `-0.0`, which shows where a quotient by it is infinite.
    """
    return _replace_by_operand(
        gm,
        lambda node: (
            node.args[0] if is_op(node, aten.add.Tensor) and _is_zero(node.args[1]) else None
        ),
    )


def _replace_by_operand(gm: fx.GraphModule, find_operand: Callable[[fx.Node], Any]) -> int:
    sites = 0
    for node in iter_calls(gm):
        source = find_operand(node)
        if isinstance(source, fx.Node) and may_stand_for(source, node):
            replace(node, source)
            sites += 1
    return sites


def _is_zero(arg: object) -> bool:
    number = scalar(arg)
    return number is not None and number == 0


def _find_unchanged_operand(node: fx.Node) -> Any:
    """The operand that a call returns unchanged, or None."""
    # Multiplication commutes, so the 1 may be on either side.
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
        # `x - (-0.0)` is `x + 0.0`, which makes +0.0 of -0.0.
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
# Each returns its own result unchanged, NaN included.
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
        # `logical_not` of a number is a bool, so only of a bool does it undo itself.
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

    return _replace_by_operand(gm, inner)


def _is_bool(node: object, depth: int) -> bool:
    for _ in range(depth):
        if not is_tensor(node) or dtype(node) != torch.bool:
            return False
        node = node.args[0] if node.args else None
    return True


def idempotent_call(gm: fx.GraphModule) -> int:
    """`f(f(x))` -> `f(x)` for idempotent `f` (relu, abs, floor, round, tril ...) with equal further
    arguments.
    """

    def inner(node: fx.Node) -> Any:
        first = node.args[0] if is_op(node, *_IDEMPOTENT) else None
        equal = (
            is_op(first, node.target)  # type: ignore[arg-type]
            # `round(round(x, decimals=2), decimals=1)` is no repetition.
            and first.args[1:] == node.args[1:]
            and first.kwargs == node.kwargs
        )
        return first if equal else None

    return _replace_by_operand(gm, inner)


def trivial_cat(gm: fx.GraphModule) -> int:
    """`cat([x])` -> `x`, and pieces of length 0 go."""
    sites = 0
    for node in iter_calls(gm, aten.cat.default):
        # `cat` also skips the legacy empty tensor of shape (0,).
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
    for node in iter_calls(gm, *_REDUCTIONS, aten.max.dim, aten.min.dim):
        values = _get_only_first_item(node) if is_op(node, aten.max.dim, aten.min.dim) else node
        source, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
        if (
            values is None
            or not is_tensor(source)
            # `sum` of integers widens them.
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
            replace(values, _match_reduced(gm.graph, new, values, add=node.target in _SUMS))
        sites += 1
    return sites


def _match_reduced(graph: fx.Graph, new: fx.Node, values: fx.Node, *, add: bool) -> fx.Node:
    if add:
        # `0 + x` makes +0.0 of -0.0, as the sum does.
        new = call(graph, aten.add.Tensor, new, 0)
    # A reduction's result is fresh memory, and an output has to stay that.
    if strides(new) != strides(values) or (reaches_output(values) and not add):
        new = call(graph, aten.clone.default, new, memory_format=torch.contiguous_format)
    return new


_SUMS = (aten.sum.dim_IntList, aten.mean.dim, aten.logsumexp.default)
_REDUCTIONS = (*_SUMS, aten.amax.default, aten.amin.default, aten.prod.dim_int)


def _get_only_first_item(node: fx.Node) -> fx.Node | None:
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
    first_of_key: dict[Any, fx.Node] = {}
    sites = 0
    for node in list(gm.graph.nodes):
        if (
            node.op not in ("call_function", "get_attr")
            or not node.users
            or not _is_repeatable(node)
        ):
            continue
        key = (node.op, node.target, _make_hashable(node.args), _make_hashable(node.kwargs))
        # The first call stands before all its equals, so their readers may use it.
        first = first_of_key.setdefault(key, node)
        if first is node or (reaches_output(first) and reaches_output(node)):
            continue
        replace(node, first)
        sites += 1
    return sites


def _is_repeatable(node: fx.Node) -> bool:
    # Two uninitialised tensors are two buffers that may be filled differently.
    if node.op == "call_function" and "empty" in str(node.target):
        return False
    return not node.is_impure(impure_random=True)


def _make_hashable(arg: Any) -> Any:
    """Hashable, and different for 1, 1.0 and True, for 0.0 and -0.0; equal for NaN and NaN."""
    if isinstance(arg, fx.Node):
        return arg
    if isinstance(arg, (list, tuple)):
        return tuple(_make_hashable(item) for item in arg)
    if isinstance(arg, dict):
        return tuple((name, _make_hashable(item)) for name, item in sorted(arg.items()))
    # `1 == True == 1.0` in Python, and NaN is not equal to itself.
    return type(arg), repr(arg)


IDENTITY_RULES = (
    Rule("dead_code", dead_code),
    # Views and copies early: later rules match patterns without them.
    Rule("redundant_view", redundant_view),
    Rule("redundant_copy", redundant_copy),
    Rule("cast_chain", cast_chain),
    Rule("dropout_off", dropout_off),
    Rule("no_op_arithmetic", no_op_arithmetic),
    Rule("add_zero", add_zero, finite_only=True),
    Rule("double_inverse", double_inverse),
    Rule("repeated", idempotent_call),
    Rule("clamp_of_clamp", clamp_of_clamp),
    Rule("trivial_cat", trivial_cat),
    Rule("reduction_of_one", reduction_of_one),
    Rule("common_subexpression", common_subexpression),
)
