"""Helpers that rules are written with: match nodes, read their values and arguments, replace them.

Whether an edit is right is each rule's own validity condition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
import torch.fx as fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = [
    "arguments",
    "call",
    "dtype",
    "emit_nonfinite_mask",
    "emit_strided_copy",
    "fake_mode",
    "has_only_users",
    "is_dead_when_unused",
    "is_op",
    "is_output",
    "is_tensor",
    "iter_calls",
    "replace",
    "scalar",
    "shape",
    "strides",
    "uses_once",
    "val",
]

aten = torch.ops.aten

# So that the new node still names the user's module and line.
_KEPT_META = ("nn_module_stack", "stack_trace", "source_fn_stack")
_SCALAR_FACTORIES = (aten.full.default, aten.scalar_tensor.default)
_COPIES = (aten.lift_fresh_copy.default, aten.clone.default, aten.detach.default)


def is_op(node: object, *overloads: OpOverload[..., Any]) -> TypeGuard[fx.Node]:
    """Whether `node` is a call of one of `overloads` (False for anything that is not a node)."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in overloads


def iter_calls(gm: fx.GraphModule, *overloads: OpOverload[..., Any]) -> Iterator[fx.Node]:
    """Live calls of `overloads` (of any op if none is given), in order. The graph may be edited
    between two of them.
    """
    # A list, because rules insert and erase nodes in the loop.
    for node in list(gm.graph.nodes):
        if (
            node.op == "call_function"
            # An earlier edit may have erased a node that the list still holds.
            and not node._erased
            # Dead calls wait for the cleaning: to rewrite them is work for nothing.
            and node.users
            and (not overloads or node.target in overloads)
        ):
            yield node


def is_tensor(node: object) -> TypeGuard[fx.Node]:
    """Whether `node` is a node that holds one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def val(node: object) -> torch.Tensor:
    """The fake tensor a node holds. Raises TypeError if it holds none (test with `is_tensor` first
    where that may be).
    """
    if not is_tensor(node):
        raise TypeError(f"expected a node that holds a tensor, got {node!r}")
    value: torch.Tensor = node.meta["val"]
    return value


def shape(node: object) -> tuple[int, ...]:
    """Its shape."""
    return tuple(val(node).shape)


def strides(node: object) -> tuple[int, ...]:
    """Its strides, in elements."""
    return tuple(val(node).stride())


def dtype(node: object) -> torch.dtype:
    """Its dtype."""
    return val(node).dtype


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an ATen call by schema name, defaults filled in."""
    if not isinstance(node.target, OpOverload):
        raise TypeError(f"expected a call of an ATen overload, got {node.target!r}")
    schema = node.target._schema
    bound: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            bound[argument.name] = node.args[position]
        else:
            # FX leaves defaults out, and one graph may spell them where another does not.
            bound[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return bound


def scalar(arg: object) -> int | float | bool | None:
    """The number `arg` is for every input: a Python number, or a 0-dim tensor the graph builds from
    one. None: not known.
    """
    if isinstance(arg, (bool, int, float)):
        return arg
    if is_op(arg, *_COPIES):
        return scalar(arg.args[0])
    if is_op(arg, *_SCALAR_FACTORIES) and is_tensor(arg) and shape(arg) == ():
        bound = arguments(arg)
        number = bound["fill_value"] if "fill_value" in bound else bound["s"]
        return (
            # Through the dtype: `full([], 0.1)` in bfloat16 holds another number.
            torch.scalar_tensor(number, dtype=dtype(arg)).item()
            if isinstance(number, (bool, int, float))
            else None
        )
    if isinstance(arg, fx.Node) and arg.op == "get_attr":
        return _read_constant(arg)
    return None


def _read_constant(node: fx.Node) -> int | float | bool | None:
    owner = node.graph.owning_module
    value = getattr(owner, str(node.target), None)
    if isinstance(value, FakeTensor):
        # A fake tensor of a literal remembers its value; any other has None.
        value = value.constant
    if (
        not isinstance(value, torch.Tensor)
        or value.dim()
        or value.dtype.is_complex
        # Reading a CUDA tensor would wait for the device.
        or value.device.type != "cpu"
    ):
        return None
    number: int | float | bool = value.item()
    return number


def uses_once(node: fx.Node) -> bool:
    """Whether exactly one node uses it (that node may use it twice)."""
    return len(node.users) == 1


def has_only_users(node: fx.Node, *overloads: OpOverload[..., Any]) -> bool:
    """Whether every user is a call of one of `overloads` (so it is no graph output)."""
    return all(is_op(user, *overloads) for user in node.users)


def is_output(node: fx.Node) -> bool:
    """Whether the graph returns it."""
    return any(user.op == "output" for user in node.users)


def fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """The fake mode the graph was captured under."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, FakeTensor):
                return item.fake_mode
    return None


def call(graph: fx.Graph, overload: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new call at the insertion point of `graph`, with `meta["val"]`, so that rules can ask the
    shape of what they built.
    """
    node = graph.call_function(overload, args, kwargs)
    # Shapes of new nodes are needed at once: the rule may build on them.
    mode = fake_mode(graph)
    if mode is not None:
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda item: item.meta["val"])
        with mode, torch.no_grad():
            node.meta["val"] = overload(*fake_args, **fake_kwargs)
    return node


def replace(node: fx.Node, new: fx.Node) -> None:
    """Every use of `node` becomes a use of `new` (which must not depend on `node`); `node` is
    erased.
    """
    # Only where the new node has none: a rule may have set its own.
    for key in _KEPT_META:
        if key in node.meta and new.op == "call_function":
            new.meta.setdefault(key, node.meta[key])
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def is_dead_when_unused(node: fx.Node) -> bool:
    """Whether a node without users may go: it neither draws random numbers nor mutates, and is no
    placeholder or output.
    """
    if is_op(node, aten.native_dropout.default) and len(node.args) > 2 and node.args[2] is False:
        return True  # tagged as random, but draws nothing when not training
    return not node.is_impure(impure_random=True)


def emit_strided_copy(
    graph: fx.Graph, node: fx.Node, wanted_shape: Sequence[int], wanted_strides: Sequence[int]
) -> fx.Node | None:
    """A fresh copy of `node` with the `wanted_strides` strides, as functional calls; None unless
    they are dense (no overlap, no gap).
    """
    # The order of dims in memory: a contiguous copy in that order, seen through the inverse
    # permutation, has the strides.
    order = sorted(
        range(len(wanted_shape)),
        key=lambda dim: (wanted_strides[dim], wanted_shape[dim]),
        reverse=True,
    )
    dense = 1
    for dim in reversed(order):
        # A gap or an overlap cannot be made by permuting a contiguous copy.
        if wanted_shape[dim] > 1 and wanted_strides[dim] != dense:
            return None
        dense *= wanted_shape[dim]
    moved = node if order == sorted(order) else call(graph, aten.permute.default, node, order)
    copied = call(graph, aten.clone.default, moved, memory_format=torch.contiguous_format)
    back = (
        copied
        if moved is node
        else call(
            graph, aten.permute.default, copied, [order.index(dim) for dim in range(len(order))]
        )
    )
    if tuple(back.meta["val"].stride()) == tuple(wanted_strides) or not math.prod(wanted_shape):
        return back
    # Only strides of size-1 dimensions can differ here; they carry no data but callers may compare
    # them.
    return call(graph, aten.as_strided.default, copied, list(wanted_shape), list(wanted_strides), 0)


def emit_nonfinite_mask(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A mask of the elements that are NaN or infinite.

    By comparison, not as `0 * x != 0`: Inductor takes a product with the number 0 for 0, whatever x
    is (torch 2.13).
    """
    size = call(graph, torch.ops.aten.abs.default, node)
    finite = call(graph, torch.ops.aten.le.Scalar, size, torch.finfo(dtype(node)).max)
    return call(graph, torch.ops.aten.logical_not.default, finite)
