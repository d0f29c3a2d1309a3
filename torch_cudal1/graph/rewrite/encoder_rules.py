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
    calls,
    dtype,
    replace,
    shape,
    strides,
    val,
    with_strides,
)
from torch_cudal1.graph.rewrite.reductions import FLOATS
from torch_cudal1.graph.rewrite.rule import Rule

__all__ = ["ENCODER_RULES"]

aten = torch.ops.aten


def encoder_layer(gm: fx.GraphModule) -> int:
    """`_transformer_encoder_layer_fwd(x, ...)` -> its products, attention, norms and activation,
    each an operator of its own.

    Before: one operator that nothing can be fused into or chosen in; after: as many launches, and
    on CUDA no copy between them. Valid without a mask. Attention is what the operator takes itself
    (`_mixed`). Rounding: that of other kernels.
    """
    sites = 0
    for node in calls(gm, aten._transformer_encoder_layer_fwd.default):
        given = arguments(node)
        src, width = given["src"], given["embed_dim"]
        same_kind = {dtype(tensor) for tensor in node.all_input_nodes} == {dtype(src)} and dtype(
            src
        ) in FLOATS
        if (
            given["mask"] is not None
            or not same_kind
            or len(shape(src)) != 3
            or 0 in shape(src)
            or width % given["num_heads"]
        ):
            continue
        with gm.graph.inserting_before(node):
            new = _traced(gm.graph, _plain_layer, given)
            laid = (
                new
                if strides(new) == strides(node)
                else with_strides(gm.graph, new, shape(node), strides(node))
            )
        if laid is not None:
            replace(node, laid)
            sites += 1
    return sites


def _traced(
    graph: fx.Graph, function: Callable[[Mapping[str, Any]], torch.Tensor], given: Mapping[str, Any]
) -> fx.Node:
    """The calls that `function` makes of `given` at the insertion point."""
    names = [name for name, arg in given.items() if isinstance(arg, fx.Node)]
    with torch.no_grad():
        made = make_fx(lambda *held: function({**given, **dict(zip(names, held, strict=True))}))(
            *(val(given[n]) for n in names)
        )
    made.graph.eliminate_dead_code()
    inputs = [node for node in made.graph.nodes if node.op == "placeholder"]
    result = graph.graph_copy(
        made.graph, dict(zip(inputs, (given[name] for name in names), strict=True))
    )
    assert isinstance(result, fx.Node)
    return result


def _plain_layer(given: Mapping[str, Any]) -> torch.Tensor:
    """What `_transformer_encoder_layer_fwd` computes of its arguments, on rows (B T, E)."""
    src = given["src"]
    x: torch.Tensor = src.reshape(src.shape[0] * src.shape[1], src.shape[2])
    if given["norm_first"]:
        x = _attended(_normed(x, 1, given), given) + x
        x = _fed_forward(_normed(x, 2, given), given) + x
    else:
        x = _normed(_attended(x, given) + x, 1, given)
        x = _normed(_fed_forward(x, given) + x, 2, given)
    return x.view(src.shape)


def _normed(x: torch.Tensor, which: int, given: Mapping[str, Any]) -> torch.Tensor:
    return F.layer_norm(
        x, [x.shape[-1]], given[f"norm_weight_{which}"], given[f"norm_bias_{which}"], given["eps"]
    )


def _attended(x: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    (batch, time, width), heads = given["src"].shape, given["num_heads"]
    packed = torch.addmm(given["qkv_bias"], x, given["qkv_weight"].t()).view(
        batch, time, 3, heads, width // heads
    )
    query, key, value = (packed.select(2, place).transpose(1, 2) for place in range(3))
    mixed = _mixed(query, key, value).transpose(1, 2).reshape(x.shape)
    return torch.addmm(given["proj_bias"], mixed, given["proj_weight"].t())


def _mixed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention as native_multi_head_attention computes it: fused on CUDA for heads of whole loads,
    else in products.

    Fused attention of a CPU forgets NaN where a row has no other score.
    """
    depth = query.shape[-1]
    if query.device.type == "cuda" and depth % 8 == 0:
        return F.scaled_dot_product_attention(query, key, value)
    return torch.softmax((query * depth**-0.5) @ key.transpose(2, 3), -1) @ value


def _fed_forward(x: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    hidden = torch.addmm(given["ffn_bias_1"], x, given["ffn_weight_1"].t())
    # The operator's GELU on CUDA is the one of a cuBLASLt epilogue (torch/_decomp,
    # _addmm_activation).
    approximate = "tanh" if x.device.type == "cuda" else "none"
    hidden = F.gelu(hidden, approximate=approximate) if given["use_gelu"] else F.relu(hidden)
    return torch.addmm(given["ffn_bias_2"], hidden, given["ffn_weight_2"].t())


ENCODER_RULES = (Rule("encoder_layer", encoder_layer),)
