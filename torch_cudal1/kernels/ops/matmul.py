"""Matrix products: ATen's as nodes, and a product's operands as addresses.

`find_product` reads off the product that a fusion group is made around. Operands are tensors in any
layout, views of them included; an operand that must be computed first is refused, since the product
would compute it once for every tile (`gemm` does so for weights of few bits). `templates.gemm`
computes the product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise
from typing import Any

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.affine import (
    AffineExpr,
    Atom,
    AtomSplit,
    Index,
    flatten,
    linear_index,
)
from torch_cudal1.kernels.expr.nodes import Dot, Leaf, Node, View, constant, find_nodes, pointwise
from torch_cudal1.kernels.ops.handlers import Handler

__all__ = [
    "HANDLERS",
    "LEFT_POSITIONS",
    "Digit",
    "Operand",
    "Product",
    "Sizes",
    "find_product",
    "index_of_sizes",
    "make_product",
    "put_long_side_left",
    "put_streamed_left",
    "read_operand",
    "split_sizes",
]

_MAX_ATOM_SPLITS = 8
# Sizes of the number of a matrix, of its rows and of its columns, each counted by one digit or
# several.
Sizes = tuple[tuple[int, ...], ...]
# fp32 and half types: what tensor cores multiply with sums in fp32.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Digit:
    """A digit of the number of a matrix in its batch: `number // every % extent`. Each step of the
    digit is `stride` elements.
    """

    every: int
    extent: int
    stride: int


@dataclass(frozen=True, slots=True)
class Operand:
    """Program value `value` as a matrix: strides in elements of its rows (B: columns), of k and of
    the batch (0: shared).

    `digits`: where the matrices of a batch lie at no single stride; `batch` is 0 then.
    """

    value: int
    row: int
    depth: int
    batch: int = 0
    offset: int = 0
    digits: tuple[Digit, ...] = ()

    def reach(self, batch: int) -> int:
        """The largest step from its first element to the first one of any of `batch` matrices."""
        return self.batch * batch + sum(digit.stride * digit.extent for digit in self.digits)


@dataclass(frozen=True, slots=True)
class Product:
    """C (batch, m, n) = A (batch, m, k) B (batch, k, n), of tensors of `dtype`, summed in fp32."""

    batch: int
    m: int
    n: int
    k: int
    left: Operand
    right: Operand
    dtype: torch.dtype

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k


def put_streamed_left(product: Product) -> tuple[Product, bool]:
    """The product with the streamed operand, which is read without packing, on its left; and whether
    it was on the right.

    Its rows must be readable 16 bytes at a time. Of two such operands the larger is streamed. Raises
    NotLowerableError where neither is.
    """
    sides = [(product.m, product.left, False), (product.n, product.right, True)]
    fit = [
        side for side in sides if side[1].depth == 1 and _is_aligned(side[1]) and product.k % 4 == 0
    ]
    if not fit:
        raise NotLowerableError("neither operand has rows along k that begin at 16 bytes")
    # The larger one: packing it would cost most. Of a weight of 8192 x 8192 packing took a quarter
    # of a product with 1024 rows, and more than cuBLAS's whole time with 128.
    if not max(fit, key=lambda side: side[0])[2]:
        return product, False
    return replace(product, m=product.n, n=product.m, left=product.right, right=product.left), True


def put_long_side_left(product: Product, rows: int) -> tuple[Product, bool]:
    """The product with C transposed where its left operand has less than half of the `rows` of a
    tile and its right one more; and whether that is so.
    """
    if not product.m < rows // 2 < product.n:
        return product, False
    return replace(product, m=product.n, n=product.m, left=product.right, right=product.left), True


def _is_aligned(operand: Operand) -> bool:
    # 4 elements of fp32 are the 16 bytes of one copy.
    return all(step % 4 == 0 for step in (operand.row, operand.batch, operand.offset))


def find_product(outputs: tuple[Node, ...]) -> tuple[Dot, Product]:
    """The only product below `outputs`. Raises NotLowerableError without one, with two, or when an
    operand is not in memory.
    """
    dots = find_nodes(Dot, outputs)
    # A tile has the accumulators of one product.
    if len(dots) != 1:
        raise NotLowerableError(f"{len(dots)} matrix products in one fusion group")
    return dots[0], make_product(dots[0])


def make_product(dot: Dot, right: Operand | None = None) -> Product:
    """The product `dot`; `right`: its right operand where that is not in memory. Raises
    NotLowerableError as `find_product`.
    """
    batch = dot.left.shape[0] if len(dot.left.shape) == 3 else 1
    (m, k), n = dot.left.shape[-2:], dot.right.shape[-1]
    return Product(
        batch,
        m,
        n,
        k,
        read_operand(dot.left),
        # The right operand is kept by its columns: `row` is then the stride from one column to the
        # next for both sides, as the kernels walk them.
        right or _swap_strides(read_operand(dot.right)),
        dot.left.dtype,
    )


def _swap_strides(operand: Operand) -> Operand:
    return replace(operand, row=operand.depth, depth=operand.row)


def read_operand(node: Node) -> Operand:
    """`node`, a matrix or a batch of them, as it lies in memory behind its views: `row` along its
    rows, `depth` along its columns.

    Raises NotLowerableError where it is computed, or where a row or a column has no single stride.
    """
    sizes: Sizes = tuple((size,) for size in (1, *node.shape)[-3:])
    # Each reshape that cuts a dimension raises once; with finer sizes the walk starts over.
    for _ in range(_MAX_ATOM_SPLITS):
        index, below = index_of_sizes(sizes)[3 - len(node.shape) :], node
        try:
            while isinstance(below, View):
                index, below = below.remap(index), below.source
            break
        except AtomSplit as cut:
            sizes = split_sizes(sizes, cut)
    # Each tile of the product would compute the operand's elements again.
    if not isinstance(below, Leaf):
        raise NotLowerableError(
            "an operand is computed in the fusion group; a product reads its operands from memory"
        )
    # Views have become arithmetic on the index: what is left is a form over rows, columns and
    # batch.
    form = flatten(index, below.strides)
    batch, *matrix = (
        [_make_digit(atom, form, group) for atom in group] for group in _make_atoms(sizes)
    )
    row, depth = (_find_common_stride(digits, if_single=1) for digits in matrix)
    # Kernels step along rows and columns by one number each.
    if row is None or depth is None:
        raise NotLowerableError("an operand is a reshaped tensor whose rows have no single stride")
    # Only the batch may have digits: heads inside rows, say, which einsum would copy.
    plane = _find_common_stride(batch, if_single=0)
    rest = (
        tuple(digit for digit in batch if digit.stride and digit.extent > 1)
        if plane is None
        else ()
    )
    return Operand(below.value, row, depth, plane or 0, form.offset, rest)


def _make_digit(atom: Atom, form: AffineExpr, group: tuple[Atom, ...]) -> Digit:
    inner = group[group.index(atom) + 1 :]
    return Digit(
        math.prod(atom_inside.extent for atom_inside in inner), atom.extent, form.coefficient(atom)
    )


def _find_common_stride(digits: list[Digit], *, if_single: int) -> int | None:
    """The single stride of what the digits count; None where there is none. A single element has any
    stride: `if_single`.
    """
    digits = [digit for digit in digits if digit.extent > 1]
    # Digits with one stride between them are walked as one.
    if any(outer.stride != inner.stride * inner.extent for outer, inner in pairwise(digits)):
        return None
    return digits[-1].stride if digits else if_single


def _make_atoms(sizes: Sizes) -> tuple[tuple[Atom, ...], ...]:
    numbers = count()
    return tuple(tuple(Atom(next(numbers), size) for size in group) for group in sizes)


def index_of_sizes(sizes: Sizes) -> Index:
    """Number of the matrix, row and column as forms."""
    return tuple(linear_index(group) for group in _make_atoms(sizes))


def split_sizes(sizes: Sizes, cut: AtomSplit) -> Sizes:
    """The sizes with the atom of `cut` split in two."""
    groups: list[tuple[int, ...]] = []
    for group in _make_atoms(sizes):
        cuts = (
            (atom.extent // cut.inner, cut.inner) if atom == cut.atom else (atom.extent,)
            for atom in group
        )
        groups.append(tuple(chain.from_iterable(cuts)))
    return tuple(groups)


def _dot(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    lhs, rhs = args[:2]
    if len(args) != 2 or kwargs:
        raise NotLowerableError(f"unexpected arguments {args[2:]!r} {kwargs!r}")
    if lhs.dtype not in _DTYPES or rhs.dtype != lhs.dtype or outs[0].torch_dtype != lhs.dtype:
        raise NotLowerableError(f"a product of {lhs.dtype} and {rhs.dtype}")
    return (Dot(outs[0].shape, lhs.dtype, lhs, rhs),)


def _dot_added(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    """beta * bias + alpha * (left @ right); with beta 0 the bias is not read, NaN or not."""
    bias, lhs, rhs = args[:3]
    beta, alpha = (
        kwargs.get(name, args[i] if len(args) > i else 1) for i, name in ((3, "beta"), (4, "alpha"))
    )
    (product,) = _dot((lhs, rhs), {}, outs)
    dtype = outs[0].torch_dtype
    if alpha != 1:
        product = pointwise("({0} * {1})", product, constant(alpha, dtype), dtype=dtype)
    # As in cuBLAS and eager: NaN in a bias that is not read must not reach the result.
    if beta == 0:
        return (product,)
    added = (
        bias if beta == 1 else pointwise("({0} * {1})", bias, constant(beta, dtype), dtype=dtype)
    )
    return (pointwise("({0} + {1})", product, added, dtype=dtype, shape=outs[0].shape),)


HANDLERS: dict[str, Handler] = {
    "mm.default": _dot,
    "bmm.default": _dot,
    "addmm.default": _dot_added,
    "baddbmm.default": _dot_added,
}
# Where the left operand of each product is among its arguments: behind the bias, if there is one.
LEFT_POSITIONS: Mapping[str, int] = {
    f"aten.{name}": 1 if handler is _dot_added else 0 for name, handler in HANDLERS.items()
}
