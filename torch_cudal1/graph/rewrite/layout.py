"""Checks whether a graph still works when strides change, and describes views as cuts of a
contiguous tensor.

PyTorch's own shape functions on fake tensors give the answers. Nothing here is a rule, and nothing
decides whether a layout is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite.alias import VIEWS
from torch_cudal1.graph.rewrite.match import call, is_op, shape

__all__ = ["Cut", "emit", "find_cut", "permute", "takes_strides"]

aten = torch.ops.aten
# They read other elements where strides change.
_BY_STORAGE = (
    aten.as_strided.default,
    aten._reshape_alias.default,
)
_INDEXED = tuple(view for view in VIEWS if view not in _BY_STORAGE)


def takes_strides(graph: fx.Graph, strided_values: dict[fx.Node, torch.Tensor]) -> bool:
    """Whether the graph works if the nodes in `strided_values` have these strides: views still
    exist, and calls keep their strides.

    Views of these nodes are added to `strided_values` with their new values, and so are pointwise
    results that take over other strides. Call it under the graph's fake mode.
    """
    return all(
        _accepts_strides(node, strided_values)
        for node in list(graph.nodes)
        if node.op == "call_function" and node not in strided_values
    )


def _accepts_strides(node: fx.Node, strided_values: dict[fx.Node, torch.Tensor]) -> bool:
    # AOTAutograd's closing copy_ takes any strides.
    if strided_values.keys().isdisjoint(node.all_input_nodes) or node.target._schema.is_mutable:  # type: ignore[union-attr]
        return True
    if is_op(node, *_BY_STORAGE):
        return False
    args, kwargs = fx.map_arg(
        (node.args, node.kwargs),
        lambda item: strided_values[item] if item in strided_values else item.meta["val"],
    )
    # PyTorch's own shape function decides: rules about strides written here would drift from it.
    target: Any = node.target
    try:
        after = target(*args, **kwargs)
    except (
        RuntimeError,
        ValueError,
    ):
        # PyTorch's only sign that a view of such strides does not exist.
        return False
    pairs = zip(_list_tensors(after), _list_tensors(node.meta["val"]), strict=True)
    # A call that keeps its strides hides the change from everything after it.
    same = all(new.stride() == old.stride() for new, old in pairs)
    if is_op(node, *_INDEXED) or (
        # Element-wise results take over strides, and their readers are asked in turn.
        not same and torch.Tag.pointwise in target.tags and isinstance(after, torch.Tensor)
    ):
        strided_values[node] = after
        return True
    return same


def _list_tensors(value: Any) -> list[torch.Tensor]:
    return [
        item
        for item in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(item, torch.Tensor)
    ]


@dataclass(frozen=True)
class Cut:
    """A view of a contiguous tensor in four steps: its dims in pieces of `sizes`, an index into
    some of them (None: all of it), what is left in another `order`, and dims of size 1 at the
    places `ones`.
    """

    sizes: tuple[int, ...]
    indices: tuple[int | None, ...]
    order: tuple[int, ...]
    ones: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Calls that `emit` makes at most."""
        return 2 + len(self.ones) + sum(index is not None for index in self.indices)

    def apply_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view, of a tensor with the shape that was cut; its strides may be others, pieces of a
        dim always exist.
        """
        part = tensor.view(self.sizes)
        for dim in reversed(range(len(self.sizes))):
            index = self.indices[dim]
            part = part if index is None else part.select(dim, index)
        part = part.permute(self.order)
        for dim in self.ones:
            part = part.unsqueeze(dim)
        return part


def find_cut(sizes_of_whole: Sequence[int], view: torch.Tensor, offset: int) -> Cut | None:
    """How `view`, which starts `offset` elements into a contiguous tensor of shape
    `sizes_of_whole`, is cut out of it; None if otherwise.

    One of three projections, as heads (B, H, T, D) of a (B T, 3 H D): pieces (B, T, 3, H, D), an
    index into the third, and of the rest the order (0, 2, 1, 3).
    """
    # Strides of an empty tensor say nothing.
    if not view.numel():
        return None
    waiting = sorted(
        # Dims of size 1 may have any stride; they are put back at the end.
        (dim for dim in range(view.dim()) if view.shape[dim] > 1),
        key=view.stride,
        reverse=True,
    )
    pieces: list[tuple[int, int | None]] = []
    kept_dims: list[int] = []
    above = math.prod(sizes_of_whole)  # elements from one index to the next of what lies outside
    for size in sizes_of_whole:
        least = above // size
        while waiting and view.stride(waiting[0]) >= least:
            dim = waiting.pop(0)
            span = view.stride(dim) * view.shape[dim]
            # The view would straddle two pieces, which no reshape can express.
            if above % span or offset // span >= above // span:
                return None
            pieces += [(above // span, offset // span), (view.shape[dim], None)]
            kept_dims.append(dim)
            above, offset = view.stride(dim), offset % span
        if above % least or offset // least >= above // least:
            return None
        pieces.append((above // least, offset // least))
        above, offset = least, offset % least
    # A dim with a stride that fits into no dim of the whole, such as one of an `unfold`.
    if waiting:
        return None
    # Pieces of size 1 would only add calls.
    pieces = [(size, index) for size, index in pieces if size > 1]
    remaining_dims = sorted(kept_dims)
    unit_dims = tuple(dim for dim in range(view.dim()) if view.shape[dim] == 1)
    return Cut(
        tuple(size for size, _ in pieces),
        tuple(index for _, index in pieces),
        tuple(map(kept_dims.index, remaining_dims)),
        unit_dims,
    )


def emit(graph: fx.Graph, source: fx.Node, cut: Cut) -> fx.Node:
    """The cut as calls at the insertion point."""
    part = (
        source
        if shape(source) == cut.sizes
        else call(graph, aten.view.default, source, list(cut.sizes))
    )
    # From the last dim on, so that a select does not renumber those that follow.
    for dim in reversed(range(len(cut.sizes))):
        if cut.indices[dim] is not None:
            part = call(graph, aten.select.int, part, dim, cut.indices[dim])
    part = permute(graph, part, cut.order)
    for dim in cut.ones:
        part = call(graph, aten.unsqueeze.default, part, dim)
    return part


def permute(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """`node` with its dims in `order`, as at most one call: permutations that `node` consists of
    are taken into it.
    """
    dims = list(order)
    # Two permutations in a row are one, and fewer views let other rules see the pattern.
    while is_op(node, aten.permute.default, aten.transpose.int, aten.t.default):
        before = _read_permutation(node)
        dims = [before[dim] for dim in dims]
        node = node.args[0]  # type: ignore[assignment]
    return node if dims == sorted(dims) else call(graph, aten.permute.default, node, dims)


def _read_permutation(node: fx.Node) -> list[int]:
    """For each dim of a permutation's result the dim of its operand."""
    dims = list(range(len(shape(node))))
    if is_op(node, aten.permute.default):
        return [dims[int(dim)] for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
    if is_op(node, aten.transpose.int):
        first_dim, second_dim = (dims[int(dim)] for dim in node.args[1:3])  # type: ignore[arg-type]
        dims[first_dim], dims[second_dim] = dims[second_dim], dims[first_dim]
        return dims
    return dims[::-1]
