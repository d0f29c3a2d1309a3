"""Results whose elements come in another order than those of the product that they are made of, such
as heads that are put back inside rows.

A tile is walked in the product's order. `follow_product_order` gives such a result the dimensions
of that walk, and the strides that it has there.
"""

from __future__ import annotations

from dataclasses import replace

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.affine import (
    ZERO,
    AffineExpr,
    Atom,
    AtomSplit,
    Index,
    flatten,
    row_major,
)
from torch_cudal1.kernels.expr.from_program import Output
from torch_cudal1.kernels.expr.nodes import Conv, Dot, Map, Node, View

__all__ = ["follow_product_order"]

# What a dimension of a result is made of, outermost first, each with its stride in memory.
_AxisAtoms = list[tuple[Atom, int]]


def follow_product_order(output: Output, product: Dot | Conv) -> Output:
    """`output` with its dimensions in the order of `product`'s elements. Unchanged where they are in
    that order already, or where no order of them is.
    """
    path = _find_views(output.node, product)
    if not path:
        return output
    sizes = zip(output.spec.shape, output.spec.strides, strict=True)
    axes: list[_AxisAtoms] = [[(Atom(i, size), stride)] for i, (size, stride) in enumerate(sizes)]
    try:
        axes, place = _walk_views(axes, path, row_major(product.shape))
    # Without an affine path the result keeps its own order: the epilogue's nest refuses what does
    # not fit.
    except NotLowerableError:
        return output
    # Dimensions of size 1 have no place in the walk.
    pairs = [pair for axis in axes for pair in axis if pair[0].extent > 1]
    sorted_pairs = sorted(pairs, key=lambda pair: place.coefficient(pair[0]), reverse=True)
    shape = tuple(atom.extent for atom, _ in sorted_pairs)
    if (
        # Nothing to change, or no permutation of the product's elements: a part of them, or with
        # gaps.
        sorted_pairs == pairs
        or place.offset
        or tuple(place.coefficient(atom) for atom, _ in sorted_pairs) != row_major(shape)
    ):
        return output
    positions = {atom: i for i, (atom, _) in enumerate(sorted_pairs)}

    def remap(index: Index) -> Index:
        return tuple(
            _join_axis(
                axis, [index[positions[atom]] if atom in positions else ZERO for atom, _ in axis]
            )
            for axis in axes
        )

    # The strides go with their dimensions: the result is stored where eager would store it.
    spec = replace(output.spec, shape=shape, strides=tuple(stride for _, stride in sorted_pairs))
    return Output(output.value, View(shape, output.node.dtype, output.node, remap), spec)


def _find_views(node: Node, product: Node) -> list[View] | None:
    """The views between `node` and `product`, through element-wise steps; None where there is no
    such path.
    """
    visited: set[int] = set()

    def search(current: Node) -> list[View] | None:
        if current is product:
            return []
        if id(current) in visited:
            return None
        # Expressions are graphs: without this shared nodes would be searched once for each path to
        # them.
        visited.add(id(current))
        below = (
            (current.source,)
            if isinstance(current, View)
            else current.args
            if isinstance(current, Map)
            else ()
        )
        views_below = next((path for path in map(search, below) if path is not None), None)
        return (
            views_below
            if views_below is None or not isinstance(current, View)
            else [current, *views_below]
        )

    return search(node)


def _walk_views(
    axes: list[_AxisAtoms], path: list[View], strides: tuple[int, ...]
) -> tuple[list[_AxisAtoms], AffineExpr]:
    """The axes, split where the views split them, and the place in the product as a form over their
    atoms.
    """
    while True:
        index: Index = tuple(
            _join_axis(axis, [_make_atom_expr(atom) for atom, _ in axis]) for axis in axes
        )
        try:
            for view in path:
                index = view.remap(index)
            return axes, flatten(index, strides)
        except AtomSplit as cut:
            # Numbers from 1000 on are free: a result has far fewer dimensions.
            axes = [_split_axis(axis, cut, 1000 + sum(map(len, axes))) for axis in axes]


def _join_axis(axis: _AxisAtoms, forms: list[AffineExpr]) -> AffineExpr:
    return flatten(tuple(forms), row_major(tuple(atom.extent for atom, _ in axis)))


def _make_atom_expr(atom: Atom) -> AffineExpr:
    return AffineExpr(0, ((atom, 1),)) if atom.extent > 1 else ZERO


def _split_axis(axis: _AxisAtoms, cut: AtomSplit, free: int) -> _AxisAtoms:
    """The axis with the cut atom in two."""
    parts: _AxisAtoms = []
    for atom, stride in axis:
        if atom == cut.atom:
            parts += [
                (Atom(free, atom.extent // cut.inner), stride * cut.inner),
                (Atom(free + 1, cut.inner), stride),
            ]
        else:
            parts.append((atom, stride))
    return parts
