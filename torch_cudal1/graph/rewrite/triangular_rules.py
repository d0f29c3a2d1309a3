"""The rule that skips the half of a matrix product that is known to be zero, or is thrown away.

It cuts the product in panels. It knows nothing of symmetric or banded matrices, nor of batched
products.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    dtype,
    emit_nonfinite_mask,
    is_op,
    is_tensor,
    iter_calls,
    replace,
    shape,
    strides,
)
from torch_cudal1.graph.rewrite.rule import Rule

__all__ = ["MIN_SIZE", "TRIANGULAR_RULES"]

aten = torch.ops.aten
MIN_SIZE = 1024  # rows and inner size; smaller products are bound by launches, not by arithmetic
# (size, panels): from that size on so many panels, each of 256 rows or more.
_PANELS = (
    (4096, 8),
    (MIN_SIZE, 4),
)
_Kind: TypeAlias = Literal["lower", "upper"]


def triangular_matmul(gm: fx.GraphModule) -> int:
    """`tril(A) @ B`, `A @ tril(B)`, `tril(A @ B)` and their mixes, with triu alike -> products of
    panels, joined by `cat`.

    Panel i of P (rows, for a triangular left factor or a masked result) needs only the inner
    columns up to its last row, and of a masked result only the columns up to there: (P + 1) / 2P of
    the operations for one triangle, about 0.4 for three with P = 8. NaN and infinity stay as they
    were: a skipped product `0 * B[k, j]` adds NaN where `B[k, j]` is not finite, so the sum of
    `B * 0` over the skipped rows, which is 0 or NaN, is added to the panel: a memory-bound pass.
    Rounding: shorter sums.
    """
    sites = 0
    for node in iter_calls(gm, aten.mm.default):
        lhs, rhs = node.args
        if not (is_tensor(lhs) and is_tensor(rhs)) or not dtype(node).is_floating_point:
            continue
        a, b, mask = _find_triangle(lhs), _find_triangle(rhs), _mask(node)
        (rows, inner), columns = shape(lhs), shape(rhs)[1]
        if (
            # Smaller products are bound by launches, and panels add some.
            min(rows, inner, columns) < MIN_SIZE
            # Panels are cut for square matrices.
            or len({rows, inner, columns}) > 1
            or not (a or b or mask)
        ):
            continue
        with gm.graph.inserting_before(node):
            # A triangular left factor or a mask alone: panels of rows. A triangular right factor
            # alone: columns.
            if a or not b:
                new = _multiply_by_rows(gm.graph, lhs, rhs, structure=a, mask=mask)
            else:
                new = _multiply_by_columns(gm.graph, lhs, rhs, structure=b, mask=mask)
            # `cat` makes rows, and the product may have had another layout.
            if strides(new) != strides(node):
                new = call(gm.graph, aten.clone.default, new, memory_format=torch.contiguous_format)
        replace(node, new)
        sites += 1
    return sites


def _find_triangle(node: fx.Node) -> _Kind | None:
    """Which triangle of `node` may be non-zero, if the other is zero by construction."""
    if is_op(node, aten.t.default):
        inner = _find_triangle(node.args[0]) if is_tensor(node.args[0]) else None
        return {"lower": "upper", "upper": "lower", None: None}[inner]
    # A positive diagonal keeps elements above the main one.
    if is_op(node, aten.tril.default) and arguments(node)["diagonal"] <= 0:
        return "lower"
    return "upper" if is_op(node, aten.triu.default) and arguments(node)["diagonal"] >= 0 else None


def _mask(node: fx.Node) -> _Kind | None:
    """Which triangle of the result is all that its users keep."""
    kinds = {
        _find_triangle(user) if is_op(user, aten.tril.default, aten.triu.default) else None
        for user in node.users
    }
    return kinds.pop() if len(kinds) == 1 else None


def _split_panels(size: int) -> list[tuple[int, int]]:
    count = next(count for least, count in _PANELS if size >= least)
    # Rounded up, so that the last panel is the shorter one.
    step = -(-size // count)
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _find_needed_range(kind: _Kind | None, start: int, stop: int, size: int) -> tuple[int, int]:
    """The columns [from, to) that rows `start` to `stop` of a triangle of `size` columns reach."""
    return {"lower": (0, stop), "upper": (start, size), None: (0, size)}[kind]


def _multiply_by_rows(
    graph: fx.Graph, lhs: fx.Node, rhs: fx.Node, *, structure: _Kind | None, mask: _Kind | None
) -> fx.Node:
    size = shape(lhs)[0]
    parts = []
    for start, stop in _split_panels(size):
        inner, columns = (
            _find_needed_range(structure, start, stop, size),
            _find_needed_range(mask, start, stop, size),
        )
        rhs_columns = _slice_span(graph, rhs, 1, columns)
        rows = _slice_span(graph, _slice_span(graph, lhs, 0, (start, stop)), 1, inner)
        product = call(graph, aten.mm.default, rows, _slice_span(graph, rhs_columns, 0, inner))
        # Skipped rows of B still decide where eager has NaN.
        product = _add_skipped(graph, product, rhs_columns, inner, dim=0)
        parts.append(_pad(graph, product, columns, size, dim=1))
    return call(graph, aten.cat.default, parts, 0)


def _multiply_by_columns(
    graph: fx.Graph, lhs: fx.Node, rhs: fx.Node, *, structure: _Kind, mask: _Kind | None
) -> fx.Node:
    size = shape(lhs)[0]
    # Columns of a lower triangle reach down where its rows reach left.
    turned: dict[_Kind | None, _Kind | None] = {"lower": "upper", "upper": "lower", None: None}
    parts = []
    for start, stop in _split_panels(size):
        inner, rows = (
            _find_needed_range(turned[structure], start, stop, size),
            _find_needed_range(turned[mask], start, stop, size),
        )
        lhs_rows = _slice_span(graph, lhs, 0, rows)
        columns = _slice_span(graph, _slice_span(graph, rhs, 1, (start, stop)), 0, inner)
        product = call(graph, aten.mm.default, _slice_span(graph, lhs_rows, 1, inner), columns)
        product = _add_skipped(graph, product, lhs_rows, inner, dim=1)
        parts.append(_pad(graph, product, rows, size, dim=0))
    return call(graph, aten.cat.default, parts, 1)


def _slice_span(graph: fx.Graph, node: fx.Node, dim: int, span: tuple[int, int]) -> fx.Node:
    return (
        node if span == (0, shape(node)[dim]) else call(graph, aten.slice.Tensor, node, dim, *span)
    )


def _add_skipped(
    graph: fx.Graph, product: fx.Node, dense: fx.Node, inner: tuple[int, int], *, dim: int
) -> fx.Node:
    """Add `0 * dense` summed over the part of `dim` outside `inner`: what the products with
    structural zeros would have added.
    """
    size = shape(dense)[dim]
    for span in ((0, inner[0]), (inner[1], size)):
        if span[0] < span[1]:
            part = _slice_span(graph, dense, dim, span)
            zeros = call(
                graph,
                aten.masked_fill.Scalar,
                call(graph, aten.zeros_like.default, part),
                # `0 * x` would be folded to 0 by Inductor, NaN and all (torch 2.13).
                emit_nonfinite_mask(graph, part),
                math.nan,
            )
            product = call(
                graph,
                aten.add.Tensor,
                product,
                call(graph, aten.sum.dim_IntList, zeros, [dim], True),
            )
    return product


def _pad(graph: fx.Graph, node: fx.Node, span: tuple[int, int], size: int, *, dim: int) -> fx.Node:
    """Zeros around a panel of a masked result, where the mask will put them anyway."""
    if span == (0, size):
        return node
    before, after = span[0], size - span[1]
    return call(
        graph,
        aten.constant_pad_nd.default,
        node,
        [before, after] if dim == 1 else [0, 0, before, after],
        0.0,
    )


TRIANGULAR_RULES = (Rule("triangular_matmul", triangular_matmul),)
