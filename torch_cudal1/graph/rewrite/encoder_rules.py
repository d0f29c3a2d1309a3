"""The rule that takes PyTorch's one operator for a whole encoder layer apart, so that others see
products, attention and norms.

`torch.compile` puts that operator into the graph of an `nn.TransformerEncoderLayer` in inference.
Its part for attention, `_native_multi_head_attention`, is left alone: torch 2.13 traces
`nn.MultiheadAttention` without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from torch_cudal1.graph.rewrite.match import (
    arguments,
    dtype,
    emit_strided_copy,
    iter_calls,
    replace,
    shape,
    strides,
    val,
)
from torch_cudal1.graph.rewrite.pushed_reductions import FLOATS
from torch_cudal1.graph.rewrite.rule import Rule

__all__ = ["ENCODER_RULES"]

aten = torch.ops.aten


def encoder_layer(gm: fx.GraphModule) -> int:
    """`_transformer_encoder_layer_fwd(x, ...)` -> its products, attention, norms and activation,
    each an operator of its own.

    Before: one operator that nothing can be fused into or chosen in; after: as many launches, and
    on CUDA no copy between them. Valid without a mask. Attention is what the operator takes itself
    (`_mix_heads`). Rounding: that of other kernels.
    """
    sites = 0
    for node in iter_calls(gm, aten._transformer_encoder_layer_fwd.default):
        layer_args = arguments(node)
        src, width = layer_args["src"], layer_args["embed_dim"]
        # Mixed dtypes run in the operator under rules of its own.
        same_kind = {dtype(tensor) for tensor in node.all_input_nodes} == {dtype(src)} and dtype(
            src
        ) in FLOATS
        if (
            layer_args["mask"] is not None
            or not same_kind
            or len(shape(src)) != 3
            or 0 in shape(src)
            or width % layer_args["num_heads"]
        ):
            continue
        with gm.graph.inserting_before(node):
            # Traced from Python, so that the layer reads like the module that it replaces.
            new = _trace_into(gm.graph, _compute_layer, layer_args)
            laid = (
                new
                if strides(new) == strides(node)
                else emit_strided_copy(gm.graph, new, shape(node), strides(node))
            )
        if laid is not None:
            replace(node, laid)
            sites += 1
    return sites


def _trace_into(
    graph: fx.Graph,
    function: Callable[[Mapping[str, Any]], torch.Tensor],
    layer_args: Mapping[str, Any],
) -> fx.Node:
    """The calls that `function` makes of `layer_args` at the insertion point."""
    names = [name for name, arg in layer_args.items() if isinstance(arg, fx.Node)]
    # The operator exists in inference only.
    with torch.no_grad():
        traced = make_fx(
            lambda *held: function({**layer_args, **dict(zip(names, held, strict=True))})
        )(*(val(layer_args[n]) for n in names))
    # make_fx records calls whose results nothing reads, too.
    traced.graph.eliminate_dead_code()
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    result = graph.graph_copy(
        traced.graph, dict(zip(inputs, (layer_args[name] for name in names), strict=True))
    )
    assert isinstance(result, fx.Node)
    return result


def _compute_layer(layer_args: Mapping[str, Any]) -> torch.Tensor:
    """What `_transformer_encoder_layer_fwd` computes of its arguments, on rows (B T, E)."""
    src = layer_args["src"]
    x: torch.Tensor = src.reshape(src.shape[0] * src.shape[1], src.shape[2])
    # Both orders of nn.TransformerEncoderLayer.
    if layer_args["norm_first"]:
        x = _attend(_normalise(x, 1, layer_args), layer_args) + x
        x = _feed_forward(_normalise(x, 2, layer_args), layer_args) + x
    else:
        x = _normalise(_attend(x, layer_args) + x, 1, layer_args)
        x = _normalise(_feed_forward(x, layer_args) + x, 2, layer_args)
    return x.view(src.shape)


def _normalise(x: torch.Tensor, which: int, layer_args: Mapping[str, Any]) -> torch.Tensor:
    return F.layer_norm(
        x,
        [x.shape[-1]],
        layer_args[f"norm_weight_{which}"],
        layer_args[f"norm_bias_{which}"],
        layer_args["eps"],
    )


def _attend(x: torch.Tensor, layer_args: Mapping[str, Any]) -> torch.Tensor:
    (batch, time, width), heads = layer_args["src"].shape, layer_args["num_heads"]
    packed = torch.addmm(layer_args["qkv_bias"], x, layer_args["qkv_weight"].t()).view(
        batch, time, 3, heads, width // heads
    )
    query, key, value = (packed.select(2, place).transpose(1, 2) for place in range(3))
    mixed = _mix_heads(query, key, value).transpose(1, 2).reshape(x.shape)
    return torch.addmm(layer_args["proj_bias"], mixed, layer_args["proj_weight"].t())


def _mix_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention as native_multi_head_attention computes it: fused on CUDA for heads of whole loads,
    else in products.

    Fused attention of a CPU forgets NaN where a row has no other score.
    """
    depth = query.shape[-1]
    # The condition of PyTorch's native_multi_head_attention.
    if query.device.type == "cuda" and depth % 8 == 0:
        return F.scaled_dot_product_attention(query, key, value)
    return torch.softmax((query * depth**-0.5) @ key.transpose(2, 3), -1) @ value


def _feed_forward(x: torch.Tensor, layer_args: Mapping[str, Any]) -> torch.Tensor:
    hidden = torch.addmm(layer_args["ffn_bias_1"], x, layer_args["ffn_weight_1"].t())
    # The operator's GELU on CUDA is the one of a cuBLASLt epilogue (torch/_decomp,
    # _addmm_activation).
    approximate = "tanh" if x.device.type == "cuda" else "none"
    hidden = F.gelu(hidden, approximate=approximate) if layer_args["use_gelu"] else F.relu(hidden)
    return torch.addmm(layer_args["ffn_bias_2"], hidden, layer_args["ffn_weight_2"].t())


ENCODER_RULES = (Rule("encoder_layer", encoder_layer),)
