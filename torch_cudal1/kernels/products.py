"""Matrix products: ATen's as nodes, and a product's operands as addresses.

`product_of` reads off the one product an island is made around. Operands are tensors in any layout, views of them included; an
operand that must be computed first is refused, since the product would compute it once for every tile (`gemm` does so for weights
of few bits). How a product is computed is `gemm`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_cudal1.errors import NotLowerableError
from torch_cudal1.kernels.index import ZERO, Atom, Cut, Form, flatten
from torch_cudal1.kernels.nodes import Dot, Leaf, Node, View, constant, every, pointwise
from torch_cudal1.kernels.pointwise import Handler
from torch_cudal1.program.model import TensorSpec

__all__ = ["HANDLERS", "Operand", "Product", "product_of", "product_with", "streamed"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Operand:
    """Program value `value` as a matrix: strides in elements of its rows (B: columns), of k and of the batch (0: shared)."""

    value: int
    row: int
    depth: int
    batch: int = 0
    offset: int = 0


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


def streamed(product: Product) -> tuple[Product, bool]:
    """The product with the operand that is read as it lies as its left one, and whether that was the right one.

    Its rows must lie in memory 16 bytes at a time. Of two such operands it is the larger. Raises NotLowerableError without one.
    """
    sides = [(product.m, product.left, False), (product.n, product.right, True)]
    fit = [side for side in sides if side[1].depth == 1 and _aligned(side[1]) and product.k % 4 == 0]
    if not fit:
        raise NotLowerableError("neither operand has rows along k that begin at 16 bytes")
    if not max(fit, key=lambda side: side[0])[2]:
        return product, False
    return replace(product, m=product.n, n=product.m, left=product.right, right=product.left), True


def _aligned(operand: Operand) -> bool:
    return all(step % 4 == 0 for step in (operand.row, operand.batch, operand.offset))


def product_of(outputs: tuple[Node, ...]) -> tuple[Dot, Product]:
    """The only product below `outputs`. Raises NotLowerableError without one, with two, or when an operand is not in memory."""
    dots = every(Dot, outputs)
    if len(dots) != 1:
        raise NotLowerableError(f"{len(dots)} matrix products in one island")
    return dots[0], product_with(dots[0])


def product_with(dot: Dot, right: Operand | None = None) -> Product:
    """The product `dot`; `right`: its right operand where that is not in memory. Raises NotLowerableError as `product_of`."""
    batch = dot.left.shape[0] if len(dot.left.shape) == 3 else 1
    (m, k), n = dot.left.shape[-2:], dot.right.shape[-1]
    atoms = Atom(0, batch), Atom(1, m), Atom(2, k), Atom(3, n)
    left = _operand(dot.left, (atoms[0], atoms[1], atoms[2]), atoms[1], atoms[2])
    right = right or _operand(dot.right, (atoms[0], atoms[2], atoms[3]), atoms[3], atoms[2])
    return Product(batch, m, n, k, left, right, dot.left.dtype)


def _operand(node: Node, atoms: tuple[Atom, Atom, Atom], row: Atom, depth: Atom) -> Operand:
    index = tuple(Form(0, ((atom, 1),)) if atom.extent > 1 else ZERO for atom in atoms[3 - len(node.shape) :])
    try:
        while isinstance(node, View):
            index, node = node.remap(index), node.source
    except Cut as cut:
        raise NotLowerableError("an operand is a reshaped tensor whose rows have no single stride") from cut
    if not isinstance(node, Leaf):
        raise NotLowerableError("an operand is computed in the island; a product reads its operands from memory")
    form = flatten(index, node.strides)
    # a dimension of one element has any stride: one that lets the others be read 16 bytes at a time
    strides = [form.coefficient(atom) if atom.extent > 1 else 1 for atom in (row, depth)]
    return Operand(node.value, strides[0], strides[1], form.coefficient(atoms[0]), form.offset)


def _dot(args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]) -> tuple[Node, ...]:
    left, right = args[:2]
    if len(args) != 2 or kwargs:
        raise NotLowerableError(f"unexpected arguments {args[2:]!r} {kwargs!r}")
    if left.dtype not in _DTYPES or right.dtype != left.dtype or outs[0].torch_dtype != left.dtype:
        raise NotLowerableError(f"a product of {left.dtype} and {right.dtype}")
    return (Dot(outs[0].shape, left.dtype, left, right),)


def _dot_added(args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]) -> tuple[Node, ...]:
    """beta * bias + alpha * (left @ right); with beta 0 the bias is not read, NaN or not."""
    bias, left, right = args[:3]
    beta, alpha = (kwargs.get(name, args[i] if len(args) > i else 1) for i, name in ((3, "beta"), (4, "alpha")))
    (made,) = _dot((left, right), {}, outs)
    dtype = outs[0].torch_dtype
    if alpha != 1:
        made = pointwise("({0} * {1})", made, constant(alpha, dtype), dtype=dtype)
    if beta == 0:
        return (made,)
    added = bias if beta == 1 else pointwise("({0} * {1})", bias, constant(beta, dtype), dtype=dtype)
    return (pointwise("({0} + {1})", made, added, dtype=dtype, shape=outs[0].shape),)


HANDLERS: dict[str, Handler] = {
    "mm.default": _dot,
    "bmm.default": _dot,
    "addmm.default": _dot_added,
    "baddbmm.default": _dot_added,
}
