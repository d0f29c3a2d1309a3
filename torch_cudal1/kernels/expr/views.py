"""ATen view ops as index renamings: no data moves, the consumer's address arithmetic absorbs them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.affine import ZERO, Index, row_major, unflatten
from torch_cudal1.kernels.expr.nodes import (
    LinearIndex,
    Node,
    View,
    broadcast,
    cast,
    pointwise,
    reshape,
)
from torch_cudal1.kernels.ops.handlers import Handler
from torch_cudal1.kernels.ops.scans import exclusive_sums

__all__ = ["ALIASING", "HANDLERS", "permute"]

# Every element reads all parts and takes one of them: more parts are more loads for each element.
_MAX_STACKED = 8


def _reshape(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    return (reshape(args[0], outs[0].shape),)


def _expand(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    return (broadcast(args[0], outs[0].shape),)


def permute(node: Node, order: tuple[int, ...]) -> Node:
    """The node with dimension i being `order[i]` of the source."""
    shape = tuple(node.shape[d] for d in order)
    return View(
        shape,
        node.dtype,
        node,
        lambda index: tuple(index[order.index(d)] for d in range(len(order))),
    )


def _permute(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    rank = len(args[0].shape)
    return (permute(args[0], tuple(d % rank for d in args[1])),)


def _transpose(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    node, rank = args[0], len(args[0].shape)
    if rank == 0 or (len(args) == 1 and rank < 2):
        return (node,)
    first, second = (d % rank for d in (args[1:] or (0, 1)))
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    return (permute(node, tuple(order)),)


def _slice_dim(node: Node, dim: int, start: int, step: int, length: int) -> Node:
    shape = tuple(length if d == dim else size for d, size in enumerate(node.shape))

    def remap(index: Index) -> Index:
        return tuple(
            form.scale(step).shift(start) if d == dim else form for d, form in enumerate(index)
        )

    return View(shape, node.dtype, node, remap)


def _slice(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    node = args[0]
    dim, start, _, step = args[1:] + (0, None, None, 1)[len(args) - 1 :]
    dim, size = dim % len(node.shape), node.shape[dim]
    # As PyTorch: negative starts count from the end, and what lies outside is clamped.
    first = 0 if start is None else max(0, min(size, start + size if start < 0 else start))
    return (_slice_dim(node, dim, first, step, outs[0].shape[dim]),)


def _select(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    # A selection is a slice of one place without its dimension.
    node, dim, position = args[0], args[1] % len(args[0].shape), args[2] % args[0].shape[args[1]]
    return (reshape(_slice_dim(node, dim, position, 1, 1), outs[0].shape),)


def _split(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    node, dim = args[0], (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % len(args[0].shape)
    starts = [sum(o.shape[dim] for o in outs[:i]) for i in range(len(outs))]
    return tuple(
        _slice_dim(node, dim, start, 1, o.shape[dim]) for start, o in zip(starts, outs, strict=True)
    )


def _repeat(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    node, shape = args[0], outs[0].shape
    # Repeats may add dimensions in front.
    sizes = (1,) * (len(shape) - len(node.shape)) + node.shape

    def remap(index: Index) -> Index:
        # `repeat` wraps around: the lower digit of an index is the place in the source.
        digits = tuple(
            unflatten(f, (n // s, s))[1] if s > 1 else ZERO
            for f, n, s in zip(index, shape, sizes, strict=True)
        )
        return digits[len(shape) - len(node.shape) :]

    return (View(shape, node.dtype, node, remap),)


def _stack(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    """A stack as a selection: nothing is copied, but each element reads all parts. The nibbles of a
    byte are one read.
    """
    parts, shape = args[0], outs[0].shape
    if not 1 < len(parts) <= _MAX_STACKED or len({part.dtype for part in parts}) > 1:
        raise NotLowerableError(f"a stack of {len(parts)} tensors")
    dim = (args[1] if len(args) > 1 else 0) % len(shape)
    place = LinearIndex(shape, torch.int64, tuple(int(d == dim) for d in range(len(shape))))
    flat = tuple(1 if d == dim else size for d, size in enumerate(shape))
    *earlier, selected = (reshape(part, flat) for part in parts)
    # The last part is what no test selects, so that there is one test less than there are parts.
    for number in reversed(range(len(earlier))):
        selected = pointwise(
            f"tl.where({{0}} == {number}, {{1}}, {{2}})",
            place,
            earlier[number],
            selected,
            dtype=parts[0].dtype,
        )
    return (selected,)


def _cat(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    """A concatenation as a stack of pieces of one length. Zeros in front of running sums make an
    exclusive scan.
    """
    parts, shape = args[0], outs[0].shape
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(1, len(shape))
    # ATen skips tensors of shape (0,) of another rank in a concatenation: they have no place here.
    if any(len(part.shape) != len(shape) for part in parts):
        raise NotLowerableError("a concatenation with a tensor of another rank")
    # Zeros in front of running sums are a scan that leaves its own element out, not a copy.
    if (sums := exclusive_sums(parts, shape, dim)) is not None:
        return (sums,)
    # Pieces of one length are a stack, whose selection is by a digit of the index.
    unit = math.gcd(*(part.shape[dim] for part in parts))
    if not unit:
        raise NotLowerableError("a concatenation of nothing")
    pieces = tuple(
        _slice_dim(part, dim, start, 1, unit)
        for part in parts
        for start in range(0, part.shape[dim], unit)
    )
    if len(pieces) == 1:
        return pieces
    if len(pieces) > _MAX_STACKED:
        raise NotLowerableError(f"a concatenation of {len(pieces)} pieces")
    sizes = (*shape[:dim], len(pieces), unit, *shape[dim + 1 :])
    (stacked,) = _stack(
        (pieces, dim), {}, (replace(outs[0], shape=sizes, strides=row_major(sizes)),)
    )
    return (reshape(stacked, shape),)


def _arange(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    start, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
    dtype = outs[0].torch_dtype
    if dtype.is_floating_point or not all(isinstance(number, int) for number in (start, step)):
        raise NotLowerableError("a range of numbers that are not whole")
    place = LinearIndex(outs[0].shape, torch.int64, (1,))
    # Computed in int64 and then converted, so that a range of int32 does not overflow on the way.
    return (cast(pointwise(f"({{0}} * {step} + {start})", place, dtype=torch.int64), dtype),)


def _glu(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    node, rank = args[0], len(args[0].shape)
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", -1)) % rank
    half = node.shape[dim] // 2
    value, gate = _slice_dim(node, dim, 0, 1, half), _slice_dim(node, dim, half, 1, half)
    return (
        pointwise(
            # Division and exponential as in eager's sigmoid.
            "({0} * tl.div_rn(1.0, 1.0 + libdevice.exp(-{1})))",
            value,
            gate,
            dtype=outs[0].torch_dtype,
        ),
    )


# results of these ops share memory with their input in eager
ALIASING = frozenset(
    {
        *(
            "view.default",
            "reshape.default",
            "flatten.using_ints",
            "unsqueeze.default",
            "squeeze.default",
            "squeeze.dim",
            "squeeze.dims",
        ),
        *(
            "permute.default",
            "transpose.int",
            "t.default",
            "expand.default",
            "slice.Tensor",
            "select.int",
        ),
        *(
            "split.Tensor",
            "split_with_sizes.default",
            "alias.default",
            "detach.default",
            "contiguous.default",
        ),
    }
)

HANDLERS: dict[str, Handler] = {
    **{
        f"{name}.default": _reshape
        for name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze")
    },
    **dict.fromkeys(("squeeze.dim", "squeeze.dims", "flatten.using_ints"), _reshape),
    "expand.default": _expand,
    "permute.default": _permute,
    "transpose.int": _transpose,
    "t.default": _transpose,
    "slice.Tensor": _slice,
    "select.int": _select,
    "split.Tensor": _split,
    "split_with_sizes.default": _split,
    "repeat.default": _repeat,
    "glu.default": _glu,
    "stack.default": _stack,
    "cat.default": _cat,
    **dict.fromkeys(("arange.default", "arange.start", "arange.start_step"), _arange),
}
