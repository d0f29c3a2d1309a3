"""cumsum and cumprod along one dimension: forward, reversed (flip, scan, flip), exclusive (zeros in
front, the last left out).

Bytes moved: one read and one write of the tensor; a row that does not fit a tile goes through in
several, with the running total carried from one to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.affine import AffineExpr, Atom, Index
from torch_cudal1.kernels.expr.nodes import Constant, Flip, Map, Node, Scan, View, cast
from torch_cudal1.kernels.ops.handlers import Handler

__all__ = ["HANDLERS", "exclusive_sums"]


def _scan(kind: str) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        if not args[0].shape:
            raise NotLowerableError("a scan of a scalar")
        # Integers are summed in the result's type (int64), as in eager.
        dtype = outs[0].torch_dtype
        return (
            Scan(args[0].shape, dtype, kind, cast(args[0], dtype), args[1] % len(args[0].shape)),
        )

    return handle


def _flip(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    node, dims = args[0], tuple(d % len(args[0].shape) for d in args[1])
    if len(dims) != 1:
        raise NotLowerableError("a flip of several dimensions")
    (dim,) = dims
    if (
        # flip, scan, flip is a scan from the end: neither flip is a copy then.
        isinstance(node, Scan)
        and node.dim == dim
        and (inner := _find_flipped(node.source, dim)) is not None
    ):
        # A second pair of flips turns a reversed scan round again.
        return (replace(node, source=inner, reverse=not node.reverse),)
    # Alone it has no kernel: only a scan takes it in.
    return (Flip(node.shape, node.dtype, node, dim),)


def _find_flipped(node: Node, dim: int) -> Node | None:
    """The node that `node` flips along `dim`, conversions kept; None where it is no flip."""
    # A conversion between flip and scan changes no order.
    if isinstance(node, Map) and len(node.args) == 1 and node.args[0].shape == node.shape:
        inner = _find_flipped(node.args[0], dim)
        return None if inner is None else replace(node, args=(inner,))
    return node.source if isinstance(node, Flip) and node.dim == dim else None


def exclusive_sums(parts: Sequence[Node], shape: tuple[int, ...], dim: int) -> Node | None:
    """Zeros, then the sums of all elements but the last: the exclusive sums; None for parts that
    are something else.

    Raises NotLowerableError for sums of other than all elements but the last.
    """
    if len(parts) == 2 and parts[0].shape[dim] == 1 and _is_zero(parts[0]):
        scan = parts[1]
        if (
            isinstance(scan, Scan)
            and scan.kind == "sum"
            and scan.dim == dim
            and not (scan.reverse or scan.exclusive)
        ):
            # The scan reads one place earlier, over the whole row: the zeros are what its first
            # element sees.
            return Scan(
                shape, scan.dtype, "sum", _extend_to(scan.source, shape), dim, exclusive=True
            )
    return None


def _extend_to(node: Node, shape: tuple[int, ...]) -> Node:
    """The tensor of `shape` whose slice without the last place of one dimension is `node`. Raises
    NotLowerableError where `node` is no such slice.
    """
    if isinstance(node, Map) and all(
        arg.shape in (node.shape, ()) or isinstance(arg, View) for arg in node.args
    ):
        # The element-wise steps below the scan are computed over the whole row: one place more than
        # it reads.
        return replace(
            node,
            shape=shape,
            args=tuple(arg if not arg.shape else _extend_to(arg, shape) for arg in node.args),
        )
    if (
        isinstance(node, View)
        and node.source.shape == shape
        # Only a slice from the start is all but the last place: another view would sum other
        # elements.
        and node.remap(_make_identity_index(node.shape)) == _make_identity_index(node.shape)
    ):
        return node.source
    raise NotLowerableError("running sums of other than all elements but the last")


def _make_identity_index(shape: tuple[int, ...]) -> Index:
    return tuple(AffineExpr(0, ((Atom(i, size), 1),)) for i, size in enumerate(shape))


def _is_zero(node: Node) -> bool:
    while isinstance(node, View) or (isinstance(node, Map) and node.template == "({0})"):
        node = node.source if isinstance(node, View) else node.args[0]
    # The constant's text is `tl.full([], value, type)`.
    return isinstance(node, Constant) and node.text.split(", ")[1] in ("0", "0.0", "False")


HANDLERS: dict[str, Handler] = {
    "cumsum.default": _scan("sum"),
    "cumprod.default": _scan("prod"),
    "flip.default": _flip,
}
