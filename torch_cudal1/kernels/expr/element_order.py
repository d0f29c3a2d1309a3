"""Results whose elements come in another order than those of the product they are made of: heads
put back inside rows, say.

A tile is walked in the product's order. `in_order` gives such a result the dimensions of that walk,
and the strides it has there.
"""

from __future__ import annotations

from dataclasses import replace

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.affine import ZERO, Atom, Cut, Form, Index, flatten, row_major
from torch_cudal1.kernels.expr.from_program import Output
from torch_cudal1.kernels.expr.nodes import Conv, Dot, Map, Node, View

__all__ = ["in_order"]

_Axis = list[
    tuple[Atom, int]
]  # what a dimension of a result is made of, outermost first, each with its stride in memory


def in_order(output: Output, product: Dot | Conv) -> Output:
    """`output` with dimensions that come in the order of `product`'s elements; as it is where they
    do, or where none do.
    """
    path = _views_to(output.node, product)
    if not path:
        return output
    sizes = zip(output.spec.shape, output.spec.strides, strict=True)
    axes: list[_Axis] = [[(Atom(i, size), stride)] for i, (size, stride) in enumerate(sizes)]
    try:
        axes, place = _walked(axes, path, row_major(product.shape))
    except NotLowerableError:
        return output
    given = [pair for axis in axes for pair in axis if pair[0].extent > 1]
    moved = sorted(given, key=lambda pair: place.coefficient(pair[0]), reverse=True)
    shape = tuple(atom.extent for atom, _ in moved)
    if (
        moved == given
        or place.offset
        or tuple(place.coefficient(atom) for atom, _ in moved) != row_major(shape)
    ):
        return output
    positions = {atom: i for i, (atom, _) in enumerate(moved)}

    def remap(index: Index) -> Index:
        return tuple(
            _combined(
                axis, [index[positions[atom]] if atom in positions else ZERO for atom, _ in axis]
            )
            for axis in axes
        )

    spec = replace(output.spec, shape=shape, strides=tuple(stride for _, stride in moved))
    return Output(output.value, View(shape, output.node.dtype, output.node, remap), spec)


def _views_to(node: Node, product: Node) -> list[View] | None:
    """The views between `node` and `product`, through element-wise steps; None where it is not made
    of it so.
    """
    seen: set[int] = set()

    def search(one: Node) -> list[View] | None:
        if one is product:
            return []
        if id(one) in seen:
            return None
        seen.add(id(one))
        below = (one.source,) if isinstance(one, View) else one.args if isinstance(one, Map) else ()
        found = next((path for path in map(search, below) if path is not None), None)
        return found if found is None or not isinstance(one, View) else [one, *found]

    return search(node)


def _walked(
    axes: list[_Axis], path: list[View], strides: tuple[int, ...]
) -> tuple[list[_Axis], Form]:
    """The axes, cut where the views cut them, and the place in the product of the element that they
    count.
    """
    while True:
        index: Index = tuple(_combined(axis, [_of(atom) for atom, _ in axis]) for axis in axes)
        try:
            for view in path:
                index = view.remap(index)
            return axes, flatten(index, strides)
        except Cut as cut:
            axes = [_cut_axis(axis, cut, 1000 + sum(map(len, axes))) for axis in axes]


def _combined(axis: _Axis, forms: list[Form]) -> Form:
    return flatten(tuple(forms), row_major(tuple(atom.extent for atom, _ in axis)))


def _of(atom: Atom) -> Form:
    return Form(0, ((atom, 1),)) if atom.extent > 1 else ZERO


def _cut_axis(axis: _Axis, cut: Cut, free: int) -> _Axis:
    """The axis with the cut atom in two."""
    parts: _Axis = []
    for atom, stride in axis:
        if atom == cut.atom:
            parts += [
                (Atom(free, atom.extent // cut.inner), stride * cut.inner),
                (Atom(free + 1, cut.inner), stride),
            ]
        else:
            parts.append((atom, stride))
    return parts
