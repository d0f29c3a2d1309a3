"""Rules of fused attention: one takes it apart where its one kernel leaves the tensor cores idle, one
puts a factor of its operands into its scale.
"""

from __future__ import annotations

import math
import operator

import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite.match import (
    arguments,
    call,
    dtype,
    emit_strided_copy,
    is_op,
    is_tensor,
    iter_calls,
    replace,
    scalar,
    shape,
    strides,
    uses_once,
)
from torch_cudal1.graph.rewrite.rule import Rule

__all__ = ["ATTENTION_RULES", "ATTENTION_SCALE_RULES"]

aten = torch.ops.aten
# What PyTorch takes for fp32 on CUDA.
_FUSED = (aten._scaled_dot_product_efficient_attention.default,)
_EVERY_FUSED = (
    *_FUSED,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
# What moves elements and changes none.
_LAYOUT = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.clone.default,
)
# elements of a head; up to 128 one kernel keeps them in registers
# (`graph.fusion.attention_pattern`)
_LEAST_DEPTH = 129
# The rule writes the scores to memory, which fused attention exists to avoid.
_MOST_SCORES = 2**28  # 1 GiB in fp32, beside the operands


def scale_in_attention(gm: fx.GraphModule) -> int:
    """attention(q * c, k, v, scale=s) -> attention(q, k, v, scale=c * s), and so for k.

    Whisper and BART scale their queries by a pass of their own. Where nothing else reads the scaled
    operand, and the factor is a positive number: kernels look for the largest score before it is
    scaled. Rounding: an operand is rounded once less, unless c is a power of two.
    """
    sites = 0
    for node in iter_calls(gm, *_EVERY_FUSED):
        for name in ("query", "key"):
            # Bound anew: the other operand's factor is in the scale by now.
            bound_args = arguments(node)
            scaled = _find_scaled(bound_args[name])
            # Queries that are the keys, too, would need the factor twice.
            if scaled is None or list(node.args).count(bound_args[name]) > 1:
                continue
            product, source, factor = scaled
            scale = bound_args["scale"]
            if scale is None:
                scale = 1 / math.sqrt(shape(bound_args["query"])[-1])
            node.kwargs = {**node.kwargs, "scale": scale * factor}
            replace(product, source)
            sites += 1
    return sites


def _find_scaled(operand: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """The product by a number of which `operand` is another layout, what it scales, and the number."""
    while uses_once(operand) and is_op(operand, *_LAYOUT):
        operand = operand.args[0]  # type: ignore[assignment]
    if not uses_once(operand) or not is_op(operand, aten.mul.Tensor, aten.div.Tensor):
        return None
    source, number = operand.args[:2]
    factor = scalar(number)
    if not is_tensor(source) or isinstance(factor, bool) or factor is None or factor <= 0:
        return None
    if is_op(operand, aten.div.Tensor):
        factor = 1 / factor
    is_same = (dtype(source), shape(source), strides(source)) == (
        dtype(operand),
        shape(operand),
        strides(operand),
    )
    return (operand, source, float(factor)) if is_same and math.isfinite(factor) else None


def attention_in_products(gm: fx.GraphModule) -> int:
    """Fused attention of fp32 heads over 128 -> product, scale, softmax, product.

    PyTorch's kernel computes it without tensor cores, and this package's attention kernel has no
    room for a tile of such heads; products have kernels of fp32's accuracy on tensor cores. The
    scores are then written to memory. Not with a mask or dropout, and only where no other result is
    read. Rounding: the softmax is
    taken of whole rows.
    """
    sites = 0
    for node in iter_calls(gm, *_FUSED):
        bound_args = arguments(node)
        query, key, value = (bound_args[name] for name in ("query", "key", "value"))
        # A mask would be one more pass over the scores in memory.
        masked = bound_args.get("attn_bias") is not None or bound_args["is_causal"]
        # The operator also yields the log-sum-exp and seeds, which products do not compute.
        read = [user for user in node.users if user.users]
        if (
            masked
            or bound_args["dropout_p"]
            or dtype(query) is not torch.float32
            or not all(map(_is_result, read))
        ):
            continue
        (*outer, rows, depth), columns = shape(query), shape(key)[-2]
        if (
            depth < _LEAST_DEPTH
            # Grouped heads would need keys to be repeated in memory.
            or shape(key)[:2] != tuple(outer)
            or math.prod(outer) * rows * columns > _MOST_SCORES
        ):
            continue
        for result in read:
            with gm.graph.inserting_before(result):
                output = _emit_products(gm.graph, query, key, value, bound_args["scale"])
                placed = (
                    # Fused attention returns (B, T, H, D) memory seen as (B, H, T, D), and its
                    # readers rely on that.
                    emit_strided_copy(gm.graph, output, shape(result), strides(result))
                    if strides(output) != strides(result)
                    else output
                )
            if placed is not None:
                replace(result, placed)
                sites += 1
        _erase_unread(node)
    return sites


def _erase_unread(node: fx.Node) -> None:
    """Erase the attention call once its result is unread. The clean-up keeps it, because the
    operator is tagged as random although it draws nothing without dropout.
    """
    for user in [user for user in node.users if not user.users]:
        node.graph.erase_node(user)
    if not node.users:
        node.graph.erase_node(node)


def _is_result(user: fx.Node) -> bool:
    return bool(user.target is operator.getitem and user.args[1] == 0)


def _emit_products(
    graph: fx.Graph, query: fx.Node, key: fx.Node, value: fx.Node, scale: float | None
) -> fx.Node:
    *outer, rows, depth = shape(query)
    batch, width = math.prod(outer), shape(value)[-1]
    flat = [
        # `reshape`, since heads are often a transposed view that `view` refuses.
        call(graph, aten.reshape.default, operand, [batch, *shape(operand)[-2:]])
        for operand in (query, key, value)
    ]
    turned = call(graph, aten.permute.default, flat[1], [0, 2, 1])
    scores = call(graph, aten.bmm.default, flat[0], turned)
    scaled = call(graph, aten.mul.Tensor, scores, 1 / math.sqrt(depth) if scale is None else scale)
    weights = call(graph, aten._softmax.default, scaled, -1, False)
    product = call(graph, aten.bmm.default, weights, flat[2])
    return call(graph, aten.view.default, product, [*outer, rows, width])


ATTENTION_SCALE_RULES = (Rule("scale_in_attention", scale_in_attention),)
ATTENTION_RULES = (Rule("attention_in_products", attention_in_products),)
