"""Rules of matrix algebra: products with a diagonal matrix, and scalars that meet a product.

They change rounding at most; NaN and infinity come out as in the captured graph unless a rule says
`finite_only`.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite.alias import VIEWS
from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    dtype,
    emit_nonfinite_mask,
    emit_strided_copy,
    is_op,
    is_tensor,
    iter_calls,
    replace,
    scalar,
    shape,
    strides,
    uses_once,
    val,
)
from torch_cudal1.graph.rewrite.rule import Rule

__all__ = ["ALGEBRA_RULES"]

aten = torch.ops.aten
_Factor: TypeAlias = float | fx.Node
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.mv.default)
_SUMS = (aten.addmm.default, aten.baddbmm.default)
_UNBATCHED = (aten.mm.default, aten.addmm.default)
# The last step of attention's scores in PyTorch's modules and in models that write it out.
_SOFTMAXES = (aten._softmax.default, aten._safe_softmax.default)
_TO_WEIGHTS = 8  # steps between scores and what is done with them


def _read_factors(node: fx.Node) -> tuple[Any, Any]:
    """The two factors of a matrix product."""
    return (node.args[1], node.args[2]) if is_op(node, *_SUMS) else (node.args[0], node.args[1])


# --- diagonal matrices ---


def diag_matmul(gm: fx.GraphModule) -> int:
    """`diag(v) @ B` -> `v[:, None] * B`, `A @ diag(v)` -> `A * v`, with NaN where the zeros off the
    diagonal would have made it.

    Before, row i of `diag(v) @ B` is `v[i] * B[i, j] + sum over k != i of 0 * B[k, j]`, and
    `0 * inf` and `0 * nan` are NaN. So an element is NaN as soon as its column holds a non-finite
    value in *another* row: the count of non-finite values per column, less its own. Cost: one
    reduction and one elementwise pass over B instead of 2 n^3 operations. Holds for mm, bmm, mv,
    addmm and baddbmm, from either side; rounding is that of one product instead of a sum of n,
    signs of zero may differ.
    """
    return _diagonal_products(gm, exact=True)


def diag_matmul_finite(gm: fx.GraphModule) -> int:
    """`diag(v) @ B` -> `v[:, None] * B`: `diag_matmul` without the count, right only for finite
    values.
    """
    return _diagonal_products(gm, exact=False)


def _diagonal_products(gm: fx.GraphModule, *, exact: bool) -> int:
    sites = 0
    for node in iter_calls(gm, *_PRODUCTS, *_SUMS):
        lhs, rhs = _read_factors(node)
        # Complex NaN has two parts, and a product of bools is no arithmetic.
        if dtype(node).is_complex or dtype(node) == torch.bool:
            continue
        with gm.graph.inserting_before(node):
            # The left factor first: of two diagonal matrices one is enough.
            if (vector := _find_diagonal(lhs)) is not None:
                scale = (
                    vector
                    if is_op(node, aten.mv.default)
                    else call(gm.graph, aten.unsqueeze.default, vector, -1)
                )
                product = _scale_by_diagonal(
                    gm.graph,
                    scale,
                    rhs,
                    over=-1 if is_op(node, aten.mv.default) else -2,
                    exact=exact,
                )
            elif (vector := _find_diagonal(rhs)) is not None:
                scale = call(gm.graph, aten.unsqueeze.default, vector, -2)
                product = _scale_by_diagonal(gm.graph, scale, lhs, over=-1, exact=exact)
            else:
                continue
            new = _match_layout(gm.graph, _add_bias(gm.graph, node, product), node)
        if new is not None:
            replace(node, new)
            sites += 1
    return sites


def _scale_by_diagonal(
    graph: fx.Graph, scale: fx.Node, matrix: fx.Node, *, over: int, exact: bool
) -> fx.Node:
    product = call(graph, aten.mul.Tensor, matrix, scale)
    # Integers have neither NaN nor infinity.
    if not exact or not dtype(matrix).is_floating_point:
        return product
    # Counts up to 2^24 are exact in float32.
    odd = call(
        graph, aten._to_copy.default, emit_nonfinite_mask(graph, matrix), dtype=torch.float32
    )
    # Less its own, since the diagonal element is multiplied by v and not by 0.
    off_diagonal = call(
        graph, aten.sub.Tensor, call(graph, aten.sum.dim_IntList, odd, [over], True), odd
    )
    return call(
        graph,
        aten.masked_fill.Scalar,
        product,
        call(graph, aten.gt.Scalar, off_diagonal, 0),
        math.nan,
    )


def _add_bias(graph: fx.Graph, node: fx.Node, product: fx.Node) -> fx.Node:
    """`beta * bias + alpha * product` for addmm and baddbmm, else the product."""
    if not is_op(node, *_SUMS):
        return product
    bound = arguments(node)
    alpha, beta, bias = bound["alpha"], bound["beta"], node.args[0]
    product = product if alpha == 1 else call(graph, aten.mul.Tensor, product, alpha)
    if beta == 0:  # then the bias is ignored, NaN and all
        return product
    return call(graph, aten.add.Tensor, product, bias, alpha=beta)


def _match_layout(graph: fx.Graph, new: fx.Node, node: fx.Node) -> fx.Node | None:
    # Promotion or broadcasting that the product does not have.
    if dtype(new) != dtype(node) or shape(new) != shape(node):
        return None
    return (
        new
        if strides(new) == strides(node)
        else emit_strided_copy(graph, new, shape(node), strides(node))
    )


def _find_diagonal(node: object) -> fx.Node | None:
    """`v` if `node` is `diag_embed(v)`, maybe transposed (it is symmetric) or expanded over new
    leading dimensions.
    """
    while is_op(
        node, aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default
    ):
        # A diagonal matrix is symmetric, so transposing its two dims changes nothing.
        rank, source = len(shape(node)), node.args[0]
        if not is_tensor(source) or shape(source)[-2:] != shape(node)[-2:]:
            return None
        if is_op(node, aten.permute.default):
            dims = [int(dim) % rank for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
            keeps_batch = dims[:-2] == list(range(rank - 2))
        else:
            moved = (
                {int(dim) % rank for dim in node.args[1:]}  # type: ignore[arg-type]
                if is_op(node, aten.transpose.int)
                else set()
            )
            keeps_batch = moved <= {rank - 1, rank - 2}
        if not keeps_batch:
            return None
        node = source
    if not is_op(node, aten.diag_embed.default):
        return None
    bound, rank = arguments(node), len(shape(node))
    plain = bound["offset"] == 0 and {bound["dim1"] % rank, bound["dim2"] % rank} == {
        rank - 1,
        rank - 2,
    }
    return node.args[0] if plain and is_tensor(node.args[0]) else None


# --- scalars ---


def scalar_folding(gm: fx.GraphModule) -> int:
    """`(x @ w) * s`, `(x * s) @ w` -> `addmm(..., alpha=s)`; `conv(x, w, b) * s` ->
    `conv(x, w * s, b * s)`; for a known number s.

    The scale of a product costs nothing inside it; a bias is scaled apart (it is small). For
    convolution the weight is scaled on every call, so it is never stale: valid when the weight is a
    quarter of the output or less and s is between 2^-16 and 2^16 (no overflow of sane weights),
    exact in half precisions only for powers of two, so only those. s is finite and not 0, hence NaN
    and infinity go the same way; a scale that is a step of attention stays, because it would hide
    the pattern from fused kernels.
    """
    return sum(_fold_after(gm, node) or _fold_before(gm, node) for node in iter_calls(gm))


def tensor_scale_folding(gm: fx.GraphModule) -> int:
    """`(x @ w) * s` -> `x @ (w * s)` for a 0-dim tensor s and an operand of at most half the
    output.

    For finite values only: an infinite s makes NaN of zero weights where it made infinity of their
    sum.
    """
    sites = 0
    for node in iter_calls(gm, aten.mul.Tensor):
        for this, other in ((0, 1), (1, 0)):
            source, factor = node.args[this], node.args[other]
            if (
                not is_tensor(source)
                or not is_tensor(factor)
                or shape(factor) != ()
                or scalar(factor) is not None
            ):
                continue
            # A view between product and scale is common: a batched linear layer.
            product = _follow_views(source)
            if (
                dtype(node) != dtype(source)
                or product is None
                or not is_op(product, *_PRODUCTS, *_SUMS, aten.convolution.default)
            ):
                continue
            if _scale_operand(gm.graph, product, factor, share=2):
                replace(node, source)
                sites += 1
                break
    return sites


def _scale_of(node: object) -> tuple[fx.Node, float] | None:
    """`(x, s)` if `node` is `x` times a number `s`, finite and not 0, with the dtype and shape of
    `x`.
    """
    if is_op(node, aten.neg.default):
        source, number = node.args[0], -1.0
    elif is_op(node, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        divides = is_op(node, aten.div.Tensor, aten.div.Scalar)
        first, second = node.args[0], node.args[1]
        # `2 * x` and `x * 2` are one.
        if not divides and scalar(first) is not None:
            first, second = second, first
        factor, source = scalar(second), first
        # 0 turns infinity into NaN, and 1 / 0 is none.
        if factor is None or not factor:
            return None
        # The reciprocal rounds once more. Whether that is within the contract is the judge's to
        # say.
        number = 1.0 / factor if divides else float(factor)
    else:
        return None
    same = (
        is_tensor(source)
        and is_tensor(node)
        and dtype(source) == dtype(node)
        and shape(source) == shape(node)
    )
    if not same or not dtype(node).is_floating_point or not math.isfinite(number) or not number:
        return None
    return source, number  # type: ignore[return-value]


def _follow_views(node: fx.Node) -> fx.Node | None:
    """What `node` is a view of, if each on the way, it included, is used once."""
    while uses_once(node):
        if not is_op(node, *VIEWS):
            return node
        node = node.args[0]  # type: ignore[assignment]
    return None


def _fold_after(gm: fx.GraphModule, node: fx.Node) -> int:
    scaling = _scale_of(node)
    product = _follow_views(scaling[0]) if scaling else None
    if scaling is None or product is None or strides(scaling[0]) != strides(node):
        return 0
    source, number = scaling
    if is_op(product, aten.convolution.default):
        # The weight is scaled in its own dtype: a power of two is exact there, other numbers round.
        if not _is_safe_factor(number, dtype(product)) or not _scale_operand(
            gm.graph, product, number, share=4
        ):
            return 0
    # `mv` has no alpha.
    elif not is_op(product, *_PRODUCTS[:2], *_SUMS) or _leads_to_attention(node, product):
        return 0
    else:
        new = _fold_into_alpha(gm.graph, product, number, scale_bias=True)
        if new is None:
            return 0
        # No view between: the scaled product takes the place of the scale itself.
        if source is product:
            replace(product, new)
            replace(node, new)
            return 1
        replace(product, new)
    replace(node, source)
    return 1


def _fold_before(gm: fx.GraphModule, node: fx.Node) -> int:
    if not is_op(node, *_PRODUCTS[:2], *_SUMS) or _leads_to_attention(node, node):
        return 0
    for operand in _read_factors(node):
        scale = _follow_views(operand)
        scaling = _scale_of(scale) if scale is not None else None
        if scaling is None or scale is None or strides(scaling[0]) != strides(scale):
            continue
        new = _fold_into_alpha(gm.graph, node, scaling[1], scale_bias=False)
        if new is not None:
            replace(node, new)
            replace(scale, scaling[0])
            return 1
    return 0


def _fold_into_alpha(
    graph: fx.Graph, node: fx.Node, number: float, *, scale_bias: bool
) -> fx.Node | None:
    """The product with `number` in its `alpha`; its bias too if `scale_bias`. None if it is empty
    or alpha would leave float32.
    """
    alpha, beta = number * float(arguments(node).get("alpha", 1)), arguments(node).get("beta", 0)
    if (
        # BLAS takes alpha in float32, which ends at 2^128.
        not 2.0**-100 < abs(alpha) < 2.0**100
        or not val(node).numel()
        or not val(_read_factors(node)[0]).numel()
    ):
        return None
    lhs, rhs = _read_factors(node)
    with graph.inserting_before(node):
        if is_op(node, *_SUMS):
            bias = node.args[0]
            # With beta 0 the bias is not read at all.
            if scale_bias and beta:
                # A small bias is scaled by a launch of its own; a large one through beta, which is
                # free.
                if 2 * val(bias).numel() <= val(node).numel():
                    bias = call(graph, aten.mul.Tensor, bias, number)
                else:
                    beta = beta * number
        else:
            # its content does not matter with beta=0; a view of an operand costs no launch
            bias = lhs
            for dim in range(len(shape(lhs))):
                bias = call(graph, aten.slice.Tensor, bias, dim, 0, 1)
        many = is_op(node, aten.bmm.default, aten.baddbmm.default)
        target = aten.baddbmm.default if many else aten.addmm.default
        return call(graph, target, bias, lhs, rhs, beta=beta, alpha=alpha)


def _scale_operand(graph: fx.Graph, product: fx.Node, factor: _Factor, *, share: int) -> bool:
    """Scale the smaller operand (of a convolution: its weight) and the bias; False if that is over
    1/`share` of the output.
    """
    args = list(product.args)
    first = 1 if is_op(product, *_SUMS, aten.convolution.default) else 0
    places = [1] if is_op(product, aten.convolution.default) else [first, first + 1]
    # Scaling an operand costs a pass over it.
    small = min(places, key=lambda place: val(args[place]).numel())
    bias = {aten.convolution.default: 2, aten.addmm.default: 0, aten.baddbmm.default: 0}.get(
        product.target
    )  # type: ignore[call-overload]
    scaled = [small] if bias is None or args[bias] is None else [small, bias]
    if any(share * val(args[place]).numel() > val(product).numel() for place in scaled):
        return False
    # The scale may be computed after the product in the captured order.
    if isinstance(factor, fx.Node) and not _move_scale_before(product, factor):
        return False
    with graph.inserting_before(product):
        for place in scaled:
            args[place] = call(graph, aten.mul.Tensor, args[place], factor)
    product.args = tuple(args)
    return True


def _move_scale_before(product: fx.Node, factor: fx.Node) -> bool:
    """Bring what `factor` needs before `product`. False if that would reorder random draws (it
    cannot depend on `product`).
    """
    order = {node: position for position, node in enumerate(product.graph.nodes)}
    late: set[fx.Node] = set()
    pending = [factor]
    while pending:
        node = pending.pop()
        if order[node] > order[product] and node not in late:
            late.add(node)
            pending.extend(node.all_input_nodes)
    # Random draws keep their order, or the generator would give them other numbers.
    if any(node.is_impure(impure_random=True) for node in late):
        return False
    # In their old order, so that each finds its operands.
    for node in sorted(late, key=order.__getitem__):
        product.prepend(node)
    return True


def _is_safe_factor(number: float, kind: torch.dtype) -> bool:
    # `frexp` gives 0.5 exactly for a power of two.
    exact = kind in (torch.float32, torch.float64) or math.frexp(number)[0] in (0.5, -0.5)
    return exact and 2.0**-16 <= abs(number) <= 2.0**16


def _leads_to_attention(node: fx.Node, product: fx.Node) -> bool:
    """Whether `node`, made of `product`, is scores: a softmax follows, or after a batched product
    another one, through element-wise steps and views (scale, mask, relu).

    One kernel computes that whole, its scale included; a product with the scale inside would be
    another operator to it.
    """
    # A second batched product may follow the scores without a softmax, as in linear attention.
    # After `mm` it would be any two layers.
    ends = _SOFTMAXES if is_op(product, *_UNBATCHED) else (*_SOFTMAXES, aten.bmm.default)
    front = [node]
    # A bounded walk: every node of a large graph is asked.
    for _step in range(_TO_WEIGHTS):
        front = [user for item in front for user in item.users]
        if any(is_op(user, *ends) for user in front):
            return True
        front = [
            user
            for user in front
            if is_op(user, *VIEWS, aten.clone.default, aten._to_copy.default) or _is_pointwise(user)
        ]
    return False


def _is_pointwise(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    )


def scalar_chain(gm: fx.GraphModule) -> int:
    """`(x * a) * b` -> `x * (a b)`, also with division and negation.

    Valid for floats when a, b and a b are between 2^-64 and 2^64 (2^8 and 2^-8 in float16), so that
    no intermediate that was finite or not zero changes to the worse. Sums are left alone:
    `(x + c) - c` with a large c rounds on purpose.
    """
    sites = 0
    for node in iter_calls(gm):
        outer = _scale_of(node)
        if outer is None or not uses_once(outer[0]):
            continue
        inner = _scale_of(outer[0])
        # float16 has 5 bits of exponent.
        limit = 8 if dtype(node) == torch.float16 else 64
        if inner is None or any(
            abs(math.log2(abs(number))) > limit
            for number in (outer[1], inner[1], outer[1] * inner[1])
        ):
            continue
        with gm.graph.inserting_before(node):
            replace(node, call(gm.graph, aten.mul.Tensor, inner[0], outer[1] * inner[1]))
        sites += 1
    return sites


ALGEBRA_RULES = (
    Rule("diag_matmul_finite", diag_matmul_finite, finite_only=True),
    Rule("diag_matmul", diag_matmul),
    Rule("scalar_chain", scalar_chain),
    Rule("scalar_folding", scalar_folding),
    Rule("tensor_scale_folding", tensor_scale_folding, finite_only=True),
)
