"""Which nodes share storage, as far as rules need it: may an older value stand where the graph made
a fresh one?

It reads schemas and a list of view ops; the storages themselves are compared by `apply` after every
rule.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch._ops import OpOverload

from torch_cudal1.graph.rewrite.match import is_op, is_tensor, shape, strides, val

__all__ = ["VIEWS", "find_base", "has_same_geometry", "may_stand_for", "reaches_output"]

aten = torch.ops.aten

# Ops that return their first argument's elements in its storage, dtype unchanged.
VIEWS: tuple[OpOverload[..., Any], ...] = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.as_strided.default,
    aten.alias.default,
    aten.detach.default,
    aten.diagonal.default,
    aten.unfold.default,
)


def find_base(node: fx.Node) -> fx.Node:
    """The node whose storage `node` is a view of (itself if it is none)."""
    # Views of views: only the end of the chain owns the storage.
    while is_op(node, *VIEWS):
        node = node.args[0]  # type: ignore[assignment]
    return node


def reaches_output(node: fx.Node) -> bool:
    """Whether the graph returns the node, a view of it, or a piece of it."""
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                return True
            # A call with results in new storage ends the search: what it returns is no part of the
            # node.
            if not _is_fresh(user):
                pending.append(user)
    return False


def may_stand_for(old: fx.Node, node: fx.Node) -> bool:
    """Whether `old` may replace `node`, which holds equal values in fresh storage, without an
    output losing that freshness.

    It needs the same dtype, shape and strides (a later view may depend on them), and that either
    `node` reaches no output in its own storage, or `old` is itself fresh and reaches none.
    """
    # The caller sees strides and dtype, whatever the values are.
    if not (is_tensor(old) and is_tensor(node)) or not _has_same_layout(old, node):
        return False
    # Inside the graph no node can tell storages apart, since nothing is written in place.
    if not reaches_output(node):
        return True
    root = find_base(old)
    return _is_fresh(root) and not reaches_output(root)


def has_same_geometry(view: fx.Node, other: fx.Node) -> bool:
    """Whether two views of one storage are the same elements in the same order."""
    return (
        _has_same_layout(view, other) and val(view).storage_offset() == val(other).storage_offset()
    )


def _has_same_layout(view: fx.Node, other: fx.Node) -> bool:
    a, b = val(view), val(other)
    return (a.dtype, a.device, shape(view), strides(view)) == (
        b.dtype,
        b.device,
        shape(other),
        strides(other),
    )


def _is_fresh(node: fx.Node) -> bool:
    """Whether a node is a call that puts its result in new storage."""
    # Placeholders and constants are memory that the caller owns.
    if node.op != "call_function" or node.target in VIEWS:
        return False
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _is_fresh(node.args[0])
    schema = getattr(node.target, "_schema", None)
    # Without a schema nothing is known of aliasing.
    return schema is not None and all(result.alias_info is None for result in schema.returns)
