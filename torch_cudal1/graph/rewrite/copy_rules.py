"""Rules that remove views, copies and casts that change nothing, and dropout that is off.

They hold bit for bit for every input, NaN and infinity included.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite.alias import VIEWS, has_same_geometry, may_stand_for
from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    dtype,
    is_op,
    is_output,
    is_tensor,
    iter_calls,
    replace,
    shape,
    strides,
    val,
)

__all__ = ["cast_chain", "dropout_off", "redundant_copy", "redundant_view"]

aten = torch.ops.aten


def redundant_view(gm: fx.GraphModule) -> int:
    """`permute(permute(x))`, `view(x)`, `expand(x)`, `slice(x)` ... that end where they began ->
    `x`.

    Valid when shape, strides and offset equal those of a tensor earlier in the chain of views: then
    it is the same elements of the same storage. A view that is an output stays: the wrapper around
    the graph expects that node.
    """
    sites = 0
    for node in iter_calls(gm, *VIEWS):
        if is_output(node):
            continue
        replacement, earlier = None, node
        while is_op(earlier, *VIEWS):
            earlier = earlier.args[0]  # type: ignore[assignment]
            replacement = (
                # The earliest equal tensor, so that the whole chain goes at once.
                earlier if is_tensor(earlier) and has_same_geometry(node, earlier) else replacement
            )
        if replacement is not None:
            replace(node, replacement)
            sites += 1
    return sites


def redundant_copy(gm: fx.GraphModule) -> int:
    """`clone(x)` or a `_to_copy(x)` to where and what `x` is already -> `x`.

    Valid when dtype, device and strides are equal, unless it is the copy that makes an output
    fresh. (Eval-mode dropout is captured as such a clone.)
    """
    sites = 0
    for node in iter_calls(
        gm, aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default
    ):
        source = node.args[0]
        # A constant is shared by all calls: the copy keeps a caller from writing to it.
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
    for node in iter_calls(gm, aten._to_copy.default):
        first = node.args[0]
        if not is_op(first, aten._to_copy.default) or not (
            _is_plain_cast(node) and _is_plain_cast(first)
        ):
            continue
        source = first.args[0]
        if (
            not is_tensor(source)
            or not _is_lossless_cast(dtype(source), dtype(first))
            # The first cast may also change the layout.
            or strides(source) != strides(first)
        ):
            continue
        # Out-of-range floats become integers in different ways, depending on the float's width.
        if dtype(source).is_floating_point and not dtype(node).is_floating_point:
            continue
        with gm.graph.inserting_before(node):
            replace(node, call(gm.graph, aten._to_copy.default, source, dtype=dtype(node)))
        sites += 1
    return sites


def _is_plain_cast(node: fx.Node) -> bool:
    source = node.args[0]
    if not is_tensor(source) or val(source).device != val(node).device:
        return False
    bound_args = arguments(node)
    # Pinning and another layout are effects that a plain cast has not.
    return not bound_args["pin_memory"] and bound_args["layout"] in (None, val(source).layout)


def _is_lossless_cast(narrow: torch.dtype, wide: torch.dtype) -> bool:
    if narrow.is_complex or wide.is_complex or wide == torch.bool:
        return narrow == wide
    if narrow == torch.bool or narrow == wide:
        return True
    if narrow.is_floating_point:
        # 8-bit floats saturate or have no infinity.
        if not wide.is_floating_point or narrow.itemsize < 2 or wide.itemsize < 2:
            return False
        small, large = torch.finfo(narrow), torch.finfo(wide)
        # The smallest subnormal must exist in the wider format as well.
        tiny = small.smallest_normal * small.eps >= large.smallest_normal * large.eps
        return small.max <= large.max and small.eps >= large.eps and tiny
    # A float holds all integers up to 2 / eps exactly.
    digits = torch.iinfo(narrow).max
    if wide.is_floating_point:
        return digits < 2 / torch.finfo(wide).eps and digits < torch.finfo(wide).max
    return torch.iinfo(wide).max >= digits and torch.iinfo(wide).min <= torch.iinfo(narrow).min


def dropout_off(gm: fx.GraphModule) -> int:
    """`native_dropout(x, p, train=False)` -> `(x, ones)`."""
    sites = 0
    for node in iter_calls(gm, aten.native_dropout.default):
        source = node.args[0]
        # A `train` of None means training.
        if node.args[2] is not False or not _is_read_only_by_items(node):
            continue
        for item in list(node.users):
            if item.args[1] == 0 and is_tensor(source) and may_stand_for(source, item):
                replace(item, source)
                sites += 1
            # The mask is kept for a backward: with dropout off it is all ones.
            elif item.args[1] == 1:
                with gm.graph.inserting_before(item):
                    mask = val(item)
                    replace(
                        item,
                        call(
                            gm.graph,
                            aten.full.default,
                            shape(item),
                            True,
                            dtype=mask.dtype,
                            device=mask.device,
                        ),
                    )
                sites += 1
    return sites


def _is_read_only_by_items(node: fx.Node) -> bool:
    """Whether a tuple is only ever taken apart."""
    return all(
        user.op == "call_function" and user.target is operator.getitem for user in node.users
    )
