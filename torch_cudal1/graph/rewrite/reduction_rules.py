"""Rules that reduce before they multiply: sums, means, traces and diagonals of matrix products.

Every rule here keeps NaN and infinity where eager puts them (`pushed_reductions` tells how), so none is
`finite_only`. Convolutions are in `conv_reduction_rules`; the tuple below names both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite.conv_reduction_rules import CONV_REDUCTION_RULES
from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    dtype,
    is_op,
    iter_calls,
    replace,
    shape,
    uses_once,
)
from torch_cudal1.graph.rewrite.pushed_reductions import (
    FLOATS,
    REDUCTIONS,
    Kind,
    Path,
    choose,
    emit_bounds,
    emit_reduction,
    estimate_work,
    finish,
    parse,
    rebuild,
    split_signs,
    trace,
)
from torch_cudal1.graph.rewrite.rule import Rule

__all__ = ["REDUCTION_RULES"]

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_ADDS = (aten.add.Tensor, aten.sub.Tensor)
_GAIN = 1.3  # estimated cost before over after; below it the extra launches are not worth a try


@dataclass(frozen=True)
class _Product:
    """left (..., M, K) times right (..., K, N), plus a bias (N) or None, seen as a tensor of shape
    `seen` (..., N).
    """

    left: fx.Node
    right: fx.Node
    bias: fx.Node | None
    seen: tuple[int, ...]

    @property
    def batched(self) -> bool:
        return len(shape(self.left)) == 3

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, M, K, N."""
        batch = shape(self.left)[0] if self.batched else 1
        return batch, shape(self.left)[-2], shape(self.left)[-1], shape(self.right)[-1]


def _match_product(node: fx.Node) -> _Product | None:
    """`node` as a product (or a view of one that keeps N last, and of a bmm M before it) whose
    parts have one floating dtype.
    """
    inner = node
    if is_op(node, *_VIEWS):
        operand = node.args[0]
        # Another reader needs the product itself.
        if not isinstance(operand, fx.Node) or not uses_once(operand):
            return None
        inner = operand
    bias = None
    if is_op(inner, aten.addmm.default):
        bound = arguments(inner)
        bias, lhs, rhs = bound["self"], bound["mat1"], bound["mat2"]
        # A bias matrix would need a reduction of its own, along the same dims.
        if bound["alpha"] != 1 or bound["beta"] != 1 or len(shape(bias)) != 1:
            return None
    elif is_op(inner, aten.mm.default, aten.bmm.default):
        lhs, rhs = inner.args
    else:
        return None
    parts = (lhs, rhs, inner) if bias is None else (lhs, rhs, inner, bias)
    # A view may split rows, as a linear layer over a batch does, and never columns.
    viewed_shape, tail = shape(node), 2 if is_op(inner, aten.bmm.default) else 1
    if (
        # Mixed dtypes would be promoted at another place.
        len({dtype(part) for part in parts}) != 1
        or dtype(inner) not in FLOATS
        or len(viewed_shape) < tail
    ):
        return None
    if 0 in (*shape(lhs), *shape(rhs)) or viewed_shape[-tail:] != shape(inner)[-tail:]:
        return None
    return _Product(lhs, rhs, bias, viewed_shape)


def _sums_rows(product: _Product, dims: Sequence[int]) -> bool:
    """Whether `dims` hold rows of the left factor (for a batched product: all of them), not only
    batch dims.
    """
    rank = len(product.seen)
    return rank - 2 in dims if product.batched else any(dim < rank - 1 for dim in dims)


def _pays(node: fx.Node, dims: tuple[int, ...]) -> bool:
    product = _match_product(node)
    if product is None or not dims:
        return False
    b, m, k, n = product.sizes
    # The result is written by the product and read by the reduction, hence twice.
    before = estimate_work(2.0 * b * m * k * n, b * (m * k + k * n + 2 * m * n))
    if len(product.seen) - 1 in dims:
        return before >= _GAIN * estimate_work(4.0 * b * m * k, b * (3 * k * n + m * k + 6 * m))
    if not _sums_rows(product, dims):
        return False
    # Rows that are left once the reduced ones are summed.
    remaining = 1 if product.batched else m
    for dim in () if product.batched else dims:
        remaining //= product.seen[dim]
    return before >= _GAIN * estimate_work(
        4.0 * b * remaining * k * n, b * (3 * m * k + k * n + 4 * remaining * n)
    )


def _push_linear(gm: fx.GraphModule) -> int:
    """sum or mean of x @ w + b, before: GEMM (2MKN flops), write and read MN; after: reduce w or x
    first, then a thin product.

    Over columns: (x @ w + b).sum(-1) -> x @ w.sum(-1) + b.sum(): 4MK flops, w read 3 times (sum,
    least, greatest). Over rows: (x @ w + b).sum(0) -> x.sum(0) @ w + M * b: 4KN flops, x read up to
    three times. Over both: columns first, then the vector that is left. The same for `mm`, `addmm`,
    `bmm`, through the views of a batched linear layer, and with scaling by numbers and additions of
    anything in between.

    Valid when nothing else uses the product; mask-exact through the twin of `pushed_reductions`
    (second row of the thin product). A GEMM with few rows is left alone: it moves as many bytes as
    its weight's sum (`_pays`).
    """
    sites = 0
    for node in iter_calls(gm, *REDUCTIONS):
        reduction = parse(node)
        path = trace(reduction.source, reduction.dims, _pays) if reduction else None
        product = _match_product(path.root) if path else None
        if reduction is None or path is None or product is None:
            continue
        with gm.graph.inserting_before(node):
            # Before the reduction, while bias and vector can still cancel element by element.
            product, path = _absorb_operand(gm.graph, product, path)
            last = len(product.seen) - 1 in path.dims
            value = (_reduce_over_columns if last else _reduce_over_rows)(
                gm.graph, product, path.dims, reduction.kind
            )
            value = _add_bias(gm.graph, product, value, path.dims, reduction.kind)
            new = finish(gm.graph, reduction, rebuild(gm.graph, path, value, reduction.kind))
        replace(node, new)
        sites += 1
    return sites


def _absorb_operand(graph: fx.Graph, product: _Product, path: Path) -> tuple[_Product, Path]:
    """Vectors that are added to the biased product, or taken from it, as one with the bias.

    Two vectors that nearly cancel element by element have means that cancel in the end, when the
    digits are gone.
    """
    bias, steps, stops = product.bias, path.steps, path.stops
    while bias is not None and steps and is_op(steps[0][0], *_ADDS) and steps[0][1] == 0:
        node = steps[0][0]
        other = node.args[1]
        if not isinstance(other, fx.Node) or shape(other) != shape(bias):
            break
        # The first step is done now, so it must not be rebuilt.
        bias, steps, stops = call(graph, node.target, bias, other), steps[1:], stops[1:]
    return _Product(product.left, product.right, bias, product.seen), Path(
        path.root, path.dims, steps, stops
    )


def _reduce_over_columns(
    graph: fx.Graph, product: _Product, dims: Sequence[int], kind: Kind
) -> fx.Node:
    """The product without bias, reduced over its last dim and any others; reduced dims kept as 1."""
    total = emit_reduction(graph, kind, product.right, [-1])
    # The twin tells where all summands have one sign.
    low, high = emit_bounds(graph, product.right, product.right, [-1])
    twin = split_signs(graph, total, low, high)
    if dtype(product.left) in (torch.float32, torch.float64):
        value = choose(
            graph, *(_emit_row_dots(graph, product.left, vector) for vector in (total, twin))
        )
    else:  # a half product must be summed in float32, which the GEMM does by itself
        # One product for both vectors: the left factor is read once.
        pair = call(graph, aten.stack.default, [total, twin], -2)
        multiply = aten.bmm.default if product.batched else aten.mm.default
        both = call(graph, multiply, pair, call(graph, aten.transpose.int, product.left, -2, -1))
        value = choose(graph, *(call(graph, aten.select.int, both, -2, i) for i in (0, 1)))
    value = call(graph, aten.reshape.default, value, [*product.seen[:-1], 1])
    return emit_reduction(
        graph, kind, value, [dim for dim in dims if dim != len(product.seen) - 1], keepdim=True
    )


def _emit_row_dots(graph: fx.Graph, rows: fx.Node, vector: fx.Node) -> fx.Node:
    """`rows @ vector` as a sum of products: summed pairwise it errs 2 to 3 times less than a
    one-column GEMM, and it fuses.
    """
    products = call(graph, aten.mul.Tensor, rows, call(graph, aten.unsqueeze.default, vector, -2))
    return call(graph, aten.sum.dim_IntList, products, [-1])


def _reduce_over_rows(
    graph: fx.Graph, product: _Product, dims: Sequence[int], kind: Kind
) -> fx.Node:
    """The product without bias, reduced over rows (and batch dims, if any) but not columns; reduced
    dims kept as 1.
    """
    _, _, k, n = product.sizes
    rank = len(product.seen)
    if product.batched:
        rows, inside = product.left, [1]
        later = [dim for dim in dims if dim < rank - 2]
        kept_shape = [*product.seen[:-2], 1, n]
    else:
        rows, inside = (
            call(graph, aten.view.default, product.left, [*product.seen[:-1], k]),
            list(dims),
        )
        later, kept_shape = (
            [],
            [1 if dim in dims else size for dim, size in enumerate(product.seen)],
        )
    total = emit_reduction(graph, kind, rows, inside)
    # Of the summed factor, which is the left one here.
    low, high = emit_bounds(graph, rows, rows, inside)
    twin = split_signs(graph, total, low, high)
    if product.batched:
        both = call(
            graph,
            aten.bmm.default,
            call(graph, aten.stack.default, [total, twin], 1),
            product.right,
        )
        value = choose(graph, *(call(graph, aten.select.int, both, 1, i) for i in (0, 1)))
    else:
        pair = call(
            graph, aten.reshape.default, call(graph, aten.stack.default, [total, twin], 0), [-1, k]
        )
        both = call(
            graph, aten.view.default, call(graph, aten.mm.default, pair, product.right), [2, -1, n]
        )
        value = choose(graph, *(call(graph, aten.select.int, both, 0, i) for i in (0, 1)))
    return emit_reduction(
        graph, kind, call(graph, aten.reshape.default, value, kept_shape), later, keepdim=True
    )


def _add_bias(
    graph: fx.Graph, product: _Product, value: fx.Node, dims: Sequence[int], kind: Kind
) -> fx.Node:
    if product.bias is None:
        return value
    last, bias = len(product.seen) - 1, product.bias
    times = 1
    for dim in dims:
        # A bias of one element for N columns counts N times in a sum, like a dim it does not have.
        times *= 1 if dim == last and shape(bias)[0] == product.seen[last] else product.seen[dim]
    if last in dims and shape(bias)[0] == product.seen[last]:
        bias = emit_reduction(graph, kind, bias, [0], keepdim=True)
    # A mean of a constant is the constant.
    if kind == "sum" and times > 1:
        bias = call(graph, aten.mul.Tensor, bias, times)
    return call(graph, aten.add.Tensor, value, bias)


def _diagonal(gm: fx.GraphModule) -> int:
    """diagonal(a @ b) -> (a * b.T).sum(-1), trace(a @ b) -> (a * b.T).sum(), the same for each
    matrix of a `bmm`.

    Before: 2MKN flops for min(M, N) numbers; after: 2K flops a number. The very same products are
    added up, so NaN and infinity stay where they were. Valid for the main diagonal of the two
    matrix dims when nothing else uses the product. Half types are multiplied and added in float32,
    as a GEMM does.
    """
    sites = 0
    for node in iter_calls(
        gm, aten.diagonal.default, aten.diagonal_copy.default, aten.trace.default
    ):
        source = node.args[0]
        if (
            not is_op(source, aten.mm.default, aten.bmm.default)
            or not uses_once(source)
            or dtype(source) not in FLOATS
        ):
            continue
        # Dims may be given as negative numbers.
        rank, bound = len(shape(source)), arguments(node)
        if bound.get("offset", 0) != 0 or (
            bound.get("dim1", -2) % rank,
            bound.get("dim2", -1) % rank,
        ) != (rank - 2, rank - 1):
            continue
        with gm.graph.inserting_before(node):
            products = _emit_diagonal_products(gm.graph, source)
            # A trace sums over the diagonal as well.
            dims = [0, 1] if is_op(node, aten.trace.default) else [-1]
            new = call(gm.graph, aten.sum.dim_IntList, products, dims)
            if dtype(new) != dtype(node):
                new = call(gm.graph, aten._to_copy.default, new, dtype=dtype(node))
        replace(node, new)
        sites += 1
    return sites


def _emit_diagonal_products(graph: fx.Graph, product: fx.Node) -> fx.Node:
    """a_ik * b_ki for each i both matrices have, shape (..., I, K); float32 for half types."""
    lhs, rhs = product.args
    # A product that is not square has a diagonal as long as its shorter side.
    count = min(shape(product)[-2:])
    factors = [lhs, call(graph, aten.transpose.int, rhs, -2, -1)]
    for place, factor in enumerate(factors):
        if shape(factor)[-2] != count:
            factors[place] = call(graph, aten.slice.Tensor, factor, -2, 0, count)
        # A GEMM adds half types in float32, and so does this.
        if dtype(factor) in (torch.float16, torch.bfloat16):
            factors[place] = call(graph, aten._to_copy.default, factors[place], dtype=torch.float32)
    return call(graph, aten.mul.Tensor, *factors)


REDUCTION_RULES: tuple[Rule, ...] = (
    Rule("diagonal_of_product", _diagonal),
    Rule("reduce_before_matmul", _push_linear),
    *CONV_REDUCTION_RULES,
)
