"""Tensor expressions: what a reference Program says, as a graph of a few kinds of node.

`Leaf` reads a Program value, `Constant` is a literal, `LinearIndex` is a coordinate, `Map` computes
element by element, `View` renames indices, `Reduce` folds dimensions, `Dot` is a matrix product,
`Conv` a convolution. Nodes are compared by identity. They hold no code but the Triton expression
template of a `Map`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.affine import ZERO, Index, flatten, row_major, unflatten

__all__ = [
    "Constant",
    "Conv",
    "Dot",
    "Flip",
    "Leaf",
    "LinearIndex",
    "LogSumExp",
    "Map",
    "Node",
    "OnlineVariant",
    "Padded",
    "Reduce",
    "Scan",
    "Softmax",
    "View",
    "broadcast",
    "cast",
    "choose_variants",
    "constant",
    "find_nodes",
    "pointwise",
    "reduce",
    "reshape",
    "round_to",
    "rounding_template",
    "sources",
    "substitute",
]

_Kind = TypeVar("_Kind", bound="Node")
# tensor dtype -> the Triton type it is computed in (half types in fp32, as eager's opmath)
COMPUTE = {
    torch.float32: "tl.float32",
    torch.float16: "tl.float32",
    torch.bfloat16: "tl.float32",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.bool: "tl.int1",
    torch.uint8: "tl.int32",
    torch.int8: "tl.int32",
    torch.float8_e4m3fn: "tl.float32",
    torch.float8_e5m2: "tl.float32",
}
# These are read and made into numbers, never written.
NARROW_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass(frozen=True, eq=False)
class Node:
    """A tensor of `shape`; `dtype` is the type eager gives it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def compute(self) -> str:
        """The Triton type its elements are computed in. Raises NotLowerableError for a dtype without
        one.
        """
        # A dtype without an entry would be computed in a type that eager does not use.
        if self.dtype not in COMPUTE:
            raise NotLowerableError(f"dtype {self.dtype} is not handled")
        return COMPUTE[self.dtype]


@dataclass(frozen=True, eq=False)
class Leaf(Node):
    """Program value number `value`, read through its strides."""

    value: int
    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Constant(Node):
    """Every element is the Triton literal `text`."""

    text: str


@dataclass(frozen=True, eq=False)
class LinearIndex(Node):
    """The element's own position: the dot product of its index with `strides` (int64)."""

    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Map(Node):
    """`template.format(*args)` element by element; the args already have the node's shape or are
    broadcast views.
    """

    template: str
    args: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Softmax(Map):
    """A Map that is the softmax of `scores` along the last dimension.

    `causal`: each row takes the scores up to its own number only. `safe`: rows of nothing but minus
    infinity yield 0, not NaN.
    """

    scores: Node
    causal: bool = False
    safe: bool = False


@dataclass(frozen=True, eq=False)
class LogSumExp(Node):
    """The log-sum-exp of the scores of `weights`: (batch, heads, rows). Rows may be padded, with
    infinities. Only the kernel that computes the weights yields it.
    """

    weights: Softmax


@dataclass(frozen=True, eq=False)
class View(Node):
    """The source at another index: `remap` takes an index of this node to an index of `source`."""

    source: Node
    remap: Callable[[Index], Index]


@dataclass(frozen=True, eq=False)
class Padded(Node):
    """As `View` of a tensor in memory, where `remap` may leave it: there an element is the Triton
    literal `fill`.
    """

    source: Node
    remap: Callable[[Index], Index]
    fill: str


@dataclass(frozen=True, eq=False)
class Reduce(Node):
    """`kind` over `dims` of `source`, which stay as size 1. Accumulates in the compute type.

    "sum", "max", "min", "prod"; and in one pass what takes two when a row is at hand: "mean", "m2"
    (squared deviations from the mean, summed), "expsum" (exponentials of the distance to the
    maximum, summed).
    """

    kind: str
    source: Node
    dims: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Dot(Node):
    """Matrix product of `left` (batch, m, k) and `right` (batch, k, n), or of two matrices; summed
    in fp32.
    """

    left: Node
    right: Node


@dataclass(frozen=True, eq=False)
class Conv(Dot):
    """Convolution of `left` (images, channels, axes) with `right`, summed in fp32; settings as
    ATen's, one number an axis.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int


@dataclass(frozen=True, eq=False)
class OnlineVariant(Node):
    """One value computed in two ways: `two_pass` from a row that stays in registers, `online` where
    each reduction reads it again.
    """

    two_pass: Node
    online: Node


@dataclass(frozen=True, eq=False)
class Scan(Node):
    """Running `kind` ("sum", "prod") along `dim` of `source`: up to and with each element
    (`exclusive`: without it).
    """

    kind: str
    source: Node
    dim: int
    reverse: bool = False
    exclusive: bool = False


@dataclass(frozen=True, eq=False)
class Flip(Node):
    """`source` with the order of `dim` reversed. Only a scan takes it in; there is no other kernel
    for it.
    """

    source: Node
    dim: int


def sources(node: Node) -> tuple[Node, ...]:
    """The nodes it is computed from."""
    if isinstance(node, Map):
        return node.args
    if isinstance(node, OnlineVariant):
        return (node.two_pass,)
    # A Softmax's `scores` are below its arguments too; a Dot's operands are not part of a nest.
    return (node.source,) if isinstance(node, (View, Padded, Reduce, Scan, Flip)) else ()


def find_nodes(kind: type[_Kind], outputs: Sequence[Node]) -> list[_Kind]:
    """The nodes of that kind among all from which `outputs` are computed, each once."""
    visited: dict[int, Node] = {}
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if id(node) not in visited:
            visited[id(node)] = node
            waiting += sources(node)
    return [node for node in visited.values() if isinstance(node, kind)]


def constant(value: bool | int | float, dtype: torch.dtype) -> Constant:
    """A scalar of `dtype`; a float is rounded to fp32 first, which is what eager's kernels receive."""
    if COMPUTE.get(dtype) == "tl.float32":
        try:
            single = struct.unpack("f", struct.pack("f", float(value)))[0]
        # `struct` refuses what rounds to infinity; eager's kernels receive the infinity.
        except OverflowError:
            single = float("inf") if value > 0 else float("-inf")
        # `inf` is no literal of Triton.
        text = repr(single) if abs(single) < float("inf") else f'float("{single}")'
    elif dtype is torch.bool:
        text = repr(bool(value))
    else:
        text = repr(int(value))
    # tl.full fixes the type: a bare Python literal outside the fp32 normal range would become fp64
    return Constant((), dtype, f"tl.full([], {text}, {COMPUTE.get(dtype, 'tl.float32')})")


def broadcast(node: Node, shape: tuple[int, ...]) -> Node:
    """The node expanded to `shape` by the broadcasting rules."""
    if node.shape == shape:
        return node
    lead = len(shape) - len(node.shape)
    sizes = node.shape
    if lead < 0 or any(s not in (1, t) for s, t in zip(sizes, shape[lead:], strict=True)):
        raise NotLowerableError(f"shape {sizes} does not broadcast to {shape}")

    def remap(index: Index) -> Index:
        return tuple(
            ZERO if size == 1 else form for size, form in zip(sizes, index[lead:], strict=True)
        )

    return View(shape, node.dtype, node, remap)


def reshape(node: Node, shape: tuple[int, ...]) -> Node:
    """The node under another shape with as many elements (row-major order)."""
    # A view that changes nothing would hide the node from comparisons by identity.
    if node.shape == shape:
        return node
    return View(
        shape,
        node.dtype,
        node,
        lambda index: unflatten(flatten(index, row_major(shape)), node.shape),
    )


def cast(node: Node, dtype: torch.dtype) -> Node:
    """The node's values in the compute type of `dtype`, without rounding to a narrower storage
    type.
    """
    old, new = node.compute, COMPUTE.get(dtype)
    if new is None:
        raise NotLowerableError(f"dtype {dtype} is not handled")
    # Half types are computed in fp32 already: only their nominal dtype differs.
    if old == new:
        return node
    # Any number but 0 is true, as in eager.
    template = "({0} != 0)" if new == "tl.int1" else f"({{0}}).to({new})"
    return Map(node.shape, dtype, template, (node,))


def round_to(node: Node, dtype: torch.dtype) -> Node:
    """An explicit conversion: like `cast`, and rounded to what `dtype` can hold."""
    plain = cast(node, dtype)
    # A conversion to the type that a value has already is none in eager either.
    if dtype not in (torch.float16, torch.bfloat16) or node.dtype == dtype:
        return plain
    # The value is rounded and then computed on in fp32, as eager's next kernel would read it.
    return Map(node.shape, dtype, rounding_template(dtype), (plain,))


def rounding_template(dtype: torch.dtype) -> str:
    """The template of a Map that rounds to a half type; what follows computes on in fp32."""
    return f"({{0}}).to(tl.{str(dtype).removeprefix('torch.')}).to(tl.float32)"


def pointwise(
    template: str, *args: Node, dtype: torch.dtype, shape: tuple[int, ...] | None = None
) -> Node:
    """A Map with its args broadcast against one another (or to `shape`)."""
    target = tuple(torch.broadcast_shapes(*(arg.shape for arg in args))) if shape is None else shape
    return Map(target, dtype, template, tuple(broadcast(arg, target) for arg in args))


def reduce(kind: str, node: Node, dims: tuple[int, ...]) -> Node:
    """A Reduce that keeps the folded dimensions as size 1."""
    shape = tuple(1 if i in dims else size for i, size in enumerate(node.shape))
    # Dimensions in order: nests and printers compare them.
    return Reduce(shape, node.dtype, kind, node, tuple(sorted(dims)))


def substitute(node: Node, substitutes: Mapping[Node, Node]) -> Node:
    """The expression with the nodes of `substitutes` exchanged. Nodes without one below them stay
    the same objects.
    """
    memo: dict[Node, Node] = {}

    def visit(n: Node) -> Node:
        if n in substitutes:
            return substitutes[n]
        if n not in memo:
            # Nodes without a substitute below them must stay the same objects, or what they share
            # would be computed twice.
            memo[n] = n
            if isinstance(n, Map):
                memo[n] = replace(n, args=tuple(visit(a) for a in n.args))
            elif isinstance(n, (View, Padded, Reduce, Scan, Flip)):
                memo[n] = replace(n, source=visit(sources(n)[0]))
        return memo[n]

    return visit(node)


def choose_variants(nodes: tuple[Node, ...], *, online: bool) -> tuple[Node, ...]:
    """The expressions with one of the two ways chosen for each `OnlineVariant`; nodes that several
    expressions share stay shared.
    """
    memo: dict[Node, Node] = {}

    def visit(n: Node) -> Node:
        # A node that several users share is resolved once, so that it stays shared.
        if n not in memo:
            resolved = n
            if isinstance(n, OnlineVariant):
                resolved = visit(n.online if online else n.two_pass)
            elif isinstance(n, Map):
                args = tuple(visit(a) for a in n.args)
                resolved = n if args == n.args else replace(n, args=args)
                # `scores` is no argument: it must be resolved too, or two versions of it would be
                # in the kernel.
                if isinstance(resolved, Softmax):
                    resolved = replace(resolved, scores=visit(resolved.scores))
            elif isinstance(n, (View, Padded, Reduce, Scan, Flip)):
                source = visit(n.source)
                resolved = n if source is n.source else replace(n, source=source)
            memo[n] = resolved
        return memo[n]

    return tuple(visit(node) for node in nodes)
