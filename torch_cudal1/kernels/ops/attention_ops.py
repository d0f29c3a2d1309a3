"""ATen's fused attention operators as two products with a softmax between, and whether expressions
are attention at all.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.ops.attention_names import FORWARDS
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.nodes import (
    Dot,
    LinearIndex,
    LogSumExp,
    Node,
    Softmax,
    broadcast,
    cast,
    constant,
    find_nodes,
    pointwise,
    reshape,
)
from torch_cudal1.kernels.expr.views import permute
from torch_cudal1.kernels.ops import softmax
from torch_cudal1.kernels.ops.handlers import Handler

__all__ = ["HANDLERS", "is_attention"]

_EFFICIENT, _FLASH, _CUDNN = FORWARDS
_NAMES = {  # what follows query, key and value in each operator's schema
    _EFFICIENT: ("bias", "logsumexp", "dropout", "causal"),
    _FLASH: ("dropout", "causal", "debug"),
    _CUDNN: ("bias", "logsumexp", "dropout", "causal", "debug"),
}


def is_attention(nodes: tuple[Node, ...]) -> bool:
    """Whether a product below `nodes` is made of another product's elements."""
    # A product of scores with values has the other product below one of its operands.
    return any(find_nodes(Dot, (product.left, product.right)) for product in find_nodes(Dot, nodes))


def _make_handler(names: tuple[str, ...]) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node | None, ...]:
        query, key, value = args[:3]
        options = dict(zip(names, args[3:], strict=False))
        bias = options.get("bias")
        # A dropout mask is random: a kernel would need PyTorch's generator to make the same one.
        if options.get("dropout") or len(query.shape) != 4 or query.dtype != key.dtype:
            raise NotLowerableError("attention with dropout, or whose keys have another type")
        key, value = (_repeat_for_heads(one, query) for one in (key, value))
        scores = _compute_scores(query, key, kwargs.get("scale"))
        if bias is not None:
            wide = reshape(broadcast(bias, (*query.shape[:2], *scores.shape[1:])), scores.shape)
            scores = pointwise(
                "({0} + {1})", scores, cast(wide, torch.float32), dtype=torch.float32
            )
        causal = bool(options.get("causal"))
        if causal:
            # The mask is part of the expression too: what is left of it for the kernel is which
            # tiles to skip.
            row, column = (
                LinearIndex(scores.shape, torch.int64, place) for place in ((0, 1, 0), (0, 0, 1))
            )
            low = constant(-math.inf, torch.float32)
            scores = pointwise(
                "tl.where({0} >= {1}, {2}, {3})", row, column, scores, low, dtype=torch.float32
            )
        # Nominally of the operands' type, in which the second product takes the weights.
        spec = TensorSpec(str(query.dtype).removeprefix("torch."), scores.shape, (1,) * 3, "cuda")
        # a row without keys, which only a bias can make, is 0
        kind, more = ("_softmax", (False,)) if bias is None else ("_safe_softmax", ())
        (weights,) = softmax.HANDLERS[f"{kind}.default"]((scores, -1, *more), {}, (spec,))
        assert isinstance(weights, Softmax)
        weights = replace(weights, causal=causal)
        # Batch and heads are one dimension: a kernel's program computes rows of a single head.
        batch, columns, size = math.prod(value.shape[:2]), value.shape[2], value.shape[3]
        attended = Dot(
            (batch, scores.shape[1], size),
            value.dtype,
            weights,
            reshape(value, (batch, columns, size)),
        )
        # An operator that is not asked for the log-sum-exp yields an empty one.
        total = LogSumExp(outs[1].shape, torch.float32, weights) if outs[1].numel else None
        # what is left are seeds, undefined without dropout, and what is None or a number
        return reshape(attended, outs[0].shape), total, *(None for _ in outs[2:])

    return handle


def _repeat_for_heads(node: Node, query: Node) -> Node:
    """Keys or values of as many heads as the queries: neighbouring queries share one (grouped and
    multi-query attention).
    """
    (batch, heads), (key_batch, key_heads) = query.shape[:2], node.shape[:2]
    if key_batch != batch or heads % key_heads:
        raise NotLowerableError(
            f"keys or values of {key_batch} x {key_heads} heads for queries of {batch} x {heads}"
        )
    # A view, no copy: repeated keys were written to memory before.
    shared = reshape(node, (batch, key_heads, 1, *node.shape[2:]))
    return reshape(
        broadcast(shared, (batch, key_heads, heads // key_heads, *node.shape[2:])),
        (batch, heads, *node.shape[2:]),
    )


def _compute_scores(query: Node, key: Node, scale: float | None) -> Node:
    """(batch and heads, rows, columns) in fp32."""
    batch, rows, depth = math.prod(query.shape[:2]), query.shape[2], query.shape[3]
    columns = key.shape[2]
    turned = permute(reshape(key, (batch, columns, depth)), (0, 2, 1))
    scores: Node = Dot(
        (batch, rows, columns), torch.float32, reshape(query, (batch, rows, depth)), turned
    )
    # The scale is applied to fp32 scores, so that it is not rounded with the operands.
    factor = constant(1 / math.sqrt(depth) if scale is None else scale, torch.float32)
    return pointwise("({0} * {1})", scores, factor, dtype=torch.float32)


HANDLERS: dict[str, Handler] = {
    f"{name}.default": _make_handler(after) for name, after in _NAMES.items()
}
