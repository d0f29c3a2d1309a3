"""Rules about several matrix products: siblings that become one GEMM, small ones that become one
batch, chains re-associated.

A merged product needs its factors before the first sibling runs; cheap views of earlier values are
rebuilt there (`_Early`). That also proves the siblings independent: one that needed another's
result could not be moved up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite.layout import takes_strides
from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    dtype,
    fake_mode,
    is_op,
    iter_calls,
    replace,
    shape,
    strides,
    uses_once,
    val,
)
from torch_cudal1.graph.rewrite.pushed_reductions import FLOATS
from torch_cudal1.graph.rewrite.rule import Rule

__all__ = ["GEMM_RULES"]

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten._unsafe_view.default)
_VIEWS = (
    *_RESHAPES,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.select.int,
    aten.slice.Tensor,
    aten.expand.default,
)
# Below this a GEMM on a large GPU takes about as long as its launch (a few us).
_SMALL_FLOPS = 2**22


@dataclass(frozen=True)
class _Gemm:
    """node = left @ right (+ bias vector)."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    bias: fx.Node | None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K, N."""
        return shape(self.left)[0], shape(self.left)[1], shape(self.right)[1]

    @property
    def device(self) -> torch.device:
        return val(self.node).device


def _iter_gemms(gm: fx.GraphModule) -> Iterable[_Gemm]:
    for node in iter_calls(gm, aten.mm.default, aten.addmm.default):
        bound = arguments(node)
        bias = bound["self"] if "mat1" in bound else None
        lhs, rhs = bound.get("mat1", bound["self"]), bound["mat2"]
        parts = [lhs, rhs] if bias is None else [lhs, rhs, bias]
        if (
            dtype(node) not in FLOATS
            # Stacked operands must have one dtype.
            or {dtype(part) for part in parts} != {dtype(node)}
            or 0 in (*shape(lhs), *shape(rhs))
        ):
            continue
        if bias is not None and (
            # Scales would have to be the same for all siblings.
            bound["alpha"] != 1 or bound["beta"] != 1 or shape(bias) != shape(rhs)[1:]
        ):
            continue
        yield _Gemm(node, lhs, rhs, bias)


@dataclass
class _Early:
    """Values as they can be had before `anchor`: earlier nodes as they are, later views of earlier
    nodes rebuilt there.
    """

    graph: fx.Graph
    anchor: fx.Node
    before: set[fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        self.before = set()
        # Positions are not stored in an FX graph: the walk finds what stands before the anchor.
        for node in self.graph.nodes:
            if node is self.anchor:
                break
            self.before.add(node)

    def can(self, node: fx.Node | None) -> bool:
        """Whether `node` can be had (None: nothing is needed)."""
        if node is None or node in self.before:
            return True
        return is_op(node, *_VIEWS) and isinstance(node.args[0], fx.Node) and self.can(node.args[0])

    def get(self, node: fx.Node) -> fx.Node:
        """`node`, or its copy before the anchor; call it only where `can` says yes, inserting
        before the anchor.
        """
        if node in self.before:
            return node
        source: Any = node.args[0]
        return call(self.graph, node.target, self.get(source), *node.args[1:], **node.kwargs)


def _make_value_key(node: fx.Node) -> Hashable:
    """Equal for nodes that are the same view of the same value (capture makes one view per use)."""
    # Capture makes one view of x for each product that reads it.
    if is_op(node, *_VIEWS) and isinstance(node.args[0], fx.Node):
        rest = tuple(tuple(a) if isinstance(a, list) else a for a in node.args[1:])
        target: Any = node.target
        return target, _make_value_key(node.args[0]), rest
    return node


def _group_by_key(gemms: Iterable[tuple[Hashable, _Gemm]]) -> list[list[_Gemm]]:
    gemms_by_key: dict[Hashable, list[_Gemm]] = {}
    for key, gemm in gemms:
        gemms_by_key.setdefault(key, []).append(gemm)
    return [group for group in gemms_by_key.values() if len(group) > 1]


def _select_movable(gm: fx.GraphModule, group: list[_Gemm]) -> tuple[_Early, list[_Gemm]]:
    # The first sibling is where the merged product must stand.
    early = _Early(gm.graph, group[0].node)
    return early, [g for g in group if all(early.can(part) for part in (g.left, g.right, g.bias))]


def _merge_siblings(gm: fx.GraphModule) -> int:
    """x @ a, x @ b, x @ c -> x @ [a b c], cut into columns (q, k, v of attention; the gates of a
    recurrent cell). `addmm` likewise.

    Before: n GEMMs, each reads x (M K); after: one GEMM of n times the width, x read once, and the
    weights copied together at every call (2 K N for all N columns: a copy kept between calls could
    go stale). So it fires where the reads saved, (n - 1) M K, are at least twice the copy: M (n -
    1) >= 4 N. Flops and each output's products are unchanged, so NaN and infinity stay where they
    were.

    Equal widths: one `baddbmm`/`bmm` with x broadcast, whose outputs are contiguous. Other widths:
    one `addmm`/`mm`, whose outputs are strided columns, and only where the views after them can
    take that (`_takes_strides`).
    """
    sites = 0
    for group in _group_by_key(
        ((_make_value_key(g.left), g.bias is None), g) for g in _iter_gemms(gm)
    ):
        early, group = _select_movable(gm, group)
        rows, width = shape(group[0].left)[0], sum(g.sizes[2] for g in group)
        # The reads saved must be twice what copying the weights costs.
        if len(group) < 2 or rows * (len(group) - 1) < 4 * width:
            continue
        # A batch first: its outputs are contiguous, so no reader has to be asked.
        if len({g.sizes[2] for g in group}) == 1:
            _merge_as_batch(gm.graph, early, group)
        elif _takes_strides(gm.graph, group, width):
            _merge_as_columns(gm.graph, early, group)
        else:
            continue
        sites += 1
    return sites


def _merge_as_batch(graph: fx.Graph, early: _Early, group: list[_Gemm]) -> None:
    _, inner, width = group[0].sizes
    with graph.inserting_before(group[0].node):
        lhs = early.get(group[0].left)
        lhs = call(
            graph,
            aten.expand.default,
            # Broadcast with stride 0: x is not copied.
            call(graph, aten.unsqueeze.default, lhs, 0),
            [len(group), *shape(lhs)],
        )
        rights = [early.get(g.right) for g in group]
        if all(strides(rhs) == (1, inner) for rhs in rights):  # t(weight): copy rows as they lie
            stacked = call(
                graph,
                aten.stack.default,
                [call(graph, aten.t.default, rhs) for rhs in rights],
                0,
            )
            rhs = call(graph, aten.transpose.int, stacked, 1, 2)
        else:
            # Weights that lie in rows already.
            rhs = call(graph, aten.stack.default, rights, 0)
        if group[0].bias is None:
            both = call(graph, aten.bmm.default, lhs, rhs)
        else:
            biases = [early.get(g.bias) for g in group if g.bias is not None]
            # (group, 1, width): `baddbmm` broadcasts it over the rows.
            bias = call(
                graph,
                aten.view.default,
                call(graph, aten.stack.default, biases, 0),
                [len(group), 1, width],
            )
            both = call(graph, aten.baddbmm.default, bias, lhs, rhs)
        # Views, without a launch.
        parts = [call(graph, aten.select.int, both, 0, place) for place in range(len(group))]
    for g, part in zip(group, parts, strict=True):
        replace(g.node, part)


def _merge_as_columns(graph: fx.Graph, early: _Early, group: list[_Gemm]) -> None:
    with graph.inserting_before(group[0].node):
        lhs, inner = early.get(group[0].left), group[0].sizes[1]
        rights = [early.get(g.right) for g in group]
        if all(strides(rhs) == (1, inner) for rhs in rights):
            stacked = call(
                graph, aten.cat.default, [call(graph, aten.t.default, rhs) for rhs in rights], 0
            )
            rhs = call(graph, aten.t.default, stacked)
        else:
            rhs = call(graph, aten.cat.default, rights, 1)
        if group[0].bias is None:
            both = call(graph, aten.mm.default, lhs, rhs)
        else:
            bias = call(
                graph, aten.cat.default, [early.get(g.bias) for g in group if g.bias is not None], 0
            )
            both = call(graph, aten.addmm.default, bias, lhs, rhs)
        parts, start = [], 0
        for g in group:
            parts.append(call(graph, aten.slice.Tensor, both, 1, start, start + g.sizes[2]))
            start += g.sizes[2]
    for g, part in zip(group, parts, strict=True):
        replace(g.node, part)


def _takes_strides(graph: fx.Graph, group: list[_Gemm], width: int) -> bool:
    """Whether the graph works if each sibling is columns of a matrix `width` wide."""
    mode = fake_mode(graph)
    if mode is None:
        return False
    with mode, torch.no_grad():
        # Columns of a wide matrix have its width as the stride of their rows.
        strided_values = {
            g.node: torch.empty_strided(
                shape(g.node), (width, 1), dtype=dtype(g.node), device=g.device
            )
            for g in group
        }
        return takes_strides(graph, strided_values)


def _batch_small(gm: fx.GraphModule) -> int:
    """Independent small products of one shape, a1 @ b1, a2 @ b2, ... -> one `bmm` of stacked
    factors.

    Before: n launches of a GEMM too small to fill the device; after: 3 launches (two stacks, one
    batched GEMM) and 2 n (M K + K N) elements copied. If all share one right factor (a layer
    applied to many pieces): [a1; a2; ...] @ b, where only the left factors are copied. Valid for at
    least 4 products without bias of at most 2^22 flops each, none needing another's result. Each
    output's products are unchanged, so NaN and infinity stay where they were.
    """
    sites = 0
    small = (
        g
        for g in _iter_gemms(gm)
        # Two flops for each multiply and add.
        if g.bias is None and 2 * g.sizes[0] * g.sizes[1] * g.sizes[2] <= _SMALL_FLOPS
    )
    for group in _group_by_key(((g.sizes, dtype(g.node), g.device), g) for g in small):
        early, group = _select_movable(gm, group)
        # Three launches replace as many as there are products, so fewer would not pay.
        if len(group) < 4:
            continue
        with gm.graph.inserting_before(group[0].node):
            lefts = [early.get(g.left) for g in group]
            # One weight for many pieces: a tall product needs no copy of it.
            if len({_make_value_key(g.right) for g in group}) == 1:
                tall = call(
                    gm.graph,
                    aten.mm.default,
                    call(gm.graph, aten.cat.default, lefts, 0),
                    early.get(group[0].right),
                )
                both = call(gm.graph, aten.view.default, tall, [len(group), *shape(group[0].node)])
            else:
                rights = call(gm.graph, aten.stack.default, [early.get(g.right) for g in group], 0)
                both = call(
                    gm.graph, aten.bmm.default, call(gm.graph, aten.stack.default, lefts, 0), rights
                )
            parts = [call(gm.graph, aten.select.int, both, 0, place) for place in range(len(group))]
        for g, part in zip(group, parts, strict=True):
            replace(g.node, part)
        sites += 1
    return sites


def _reassociate(gm: fx.GraphModule) -> int:
    """(a @ b) @ c -> a @ (b @ c), or back, when that takes at most half the flops; c may be a
    vector (`mv`).

    With a (M, K), b (K, N), c (N, P): 2 M N (K + P) flops on the left, 2 K P (N + M) on the right.
    Valid when nothing else uses the inner product. Only for finite values: an infinite element of c
    meets a sum on one side (one sign) and single products on the other (perhaps both signs: NaN).
    """
    sites = 0
    for node in iter_calls(gm, aten.mm.default, aten.mv.default):
        lhs, rhs = node.args
        if dtype(node) not in FLOATS:
            continue
        for inner, first in ((lhs, True), (rhs, False)):
            # Another use of the inner product would compute it all the same.
            if not is_op(inner, aten.mm.default) or not uses_once(inner) or lhs is rhs:
                continue
            a, b, c = (*inner.args, rhs) if first else (lhs, *inner.args)
            (m, k), n, p = shape(a), shape(b)[1], (*shape(c), 1)[1]
            ways = 2 * m * n * (k + p), 2 * k * p * (n + m)
            # At most half the flops, since the result is rounded in another order.
            if (ways[0] < 2 * ways[1]) if first else (ways[1] < 2 * ways[0]):
                continue
            with gm.graph.inserting_before(node):
                product: Any = node.target
                if first:
                    new = call(gm.graph, product, a, call(gm.graph, product, b, c))
                else:
                    new = call(gm.graph, product, call(gm.graph, aten.mm.default, a, b), c)
            replace(node, new)
            sites += 1
            break
    return sites


GEMM_RULES: tuple[Rule, ...] = (
    Rule("sibling_gemm_merge", _merge_siblings),
    Rule("small_gemm_batch", _batch_small),
    Rule("gemm_reassociation", _reassociate, finite_only=True),
)
