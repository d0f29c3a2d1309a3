"""Attention masks as PyTorch's fused kernels read them.

`scaled_dot_product_attention` takes its fused kernels only where the mask's last dimension lies
contiguously. Else it multiplies in fp32, step by step: a third of the time of ViT-B, for a mask
that hides nothing and that transformers makes only while it is compiled, and in T5, whose bias is a
transposed table. `lay_out_masks` takes the first away and copies the second, once.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

__all__ = ["lay_out_masks", "with_masks_laid_out"]

_HALVES = (torch.float16, torch.bfloat16)
# of `scaled_dot_product_attention(query, key, value, attn_mask, ...)`
_MASK = 3
# What masks that depend on no input are made with.
_PURE_FUNCTIONS = frozenset(
    {
        *(torch.arange, torch.ones, torch.full),
        *(operator.add, operator.sub, operator.getitem, operator.and_, operator.or_),
        *(operator.ge, operator.gt, operator.le, operator.lt, operator.eq),
    }
)
_PURE_METHODS = frozenset({"expand", "view", "unsqueeze"})
_MOST_BYTES = 2**20  # of a tensor that is computed to see whether a mask hides anything


def with_masks_laid_out(module: fx.GraphModule) -> fx.GraphModule:
    """A Dynamo graph with `lay_out_masks` done to a copy; `module` itself where that changes
    nothing.
    """
    if not any(map(_find_mask, module.graph.nodes)):
        return module
    graph_module = fx.GraphModule(module, copy.deepcopy(module.graph))
    graph_module.meta.update(module.meta)
    lay_out_masks(graph_module.graph)
    graph_module.recompile()
    return graph_module


def lay_out_masks(graph: fx.Graph) -> None:
    """Let each attention of half types on a GPU in a Dynamo graph read a mask whose last dimension
    is contiguous, or none where its mask hides nothing: same values. A mask that wants a gradient
    stays as it is.
    """
    copies: dict[fx.Node, fx.Node | None] = {}
    for node in list(graph.nodes):
        mask = _find_mask(node)
        if mask is None:
            continue
        if mask not in copies:
            with graph.inserting_before(node):
                copies[mask] = None if _hides_nothing(mask) else _copy_mask(graph, mask)
        node.args = tuple(copies[mask] if arg is mask else arg for arg in node.args)
        node.kwargs = {
            name: copies[mask] if arg is mask else arg for name, arg in node.kwargs.items()
        }


def _find_mask(node: fx.Node) -> fx.Node | None:
    """The mask that an attention reads and no fused kernel does."""
    if node.op != "call_function" or node.target is not F.scaled_dot_product_attention:
        return None
    mask = node.kwargs.get("attn_mask", node.args[_MASK] if len(node.args) > _MASK else None)
    query = node.kwargs.get("query", node.args[0] if node.args else None)
    if not isinstance(mask, fx.Node) or not isinstance(query, fx.Node):
        return None
    values, queries = (source.meta.get("example_value") for source in (mask, query))
    if not isinstance(values, Tensor) or not isinstance(queries, Tensor):
        return None
    is_served = queries.device.type == "cuda" and queries.dtype in _HALVES
    return mask if is_served and not values.requires_grad and _is_scattered(values) else None


def _is_scattered(mask: Tensor) -> bool:
    # Sizes of a dynamic graph are no numbers, and their strides are not known here.
    numbers = (*mask.shape, *mask.stride())
    return (
        mask.dim() >= 2
        and all(isinstance(number, int) for number in numbers)
        and mask.shape[-1] > 1
        and mask.stride(-1) != 1
    )


def _hides_nothing(mask: fx.Node) -> bool:
    """Whether a mask depends on no input, and lets every query see every key."""
    example: Tensor = mask.meta["example_value"]
    if example.dtype is not torch.bool:
        return False
    # A fake tensor, as a caller's mode would make, has no values.
    with unset_fake_temporarily(), torch.no_grad():
        values = _compute(mask, {})
        return isinstance(values, Tensor) and bool(values.all())


def _compute(node: fx.Node, values_by_node: dict[fx.Node, Any]) -> Any:
    """The value of a node that is made of numbers alone, on the CPU; None where it is not."""
    if node in values_by_node:
        return values_by_node[node]
    is_pure = node.target in (_PURE_METHODS if node.op == "call_method" else _PURE_FUNCTIONS)
    example = node.meta.get("example_value")
    if (
        node.op not in ("call_function", "call_method")
        or not is_pure
        or not isinstance(example, Tensor)
        or example.untyped_storage().nbytes() > _MOST_BYTES
    ):
        return None
    operands = {source: _compute(source, values_by_node) for source in node.all_input_nodes}
    if any(value is None for value in operands.values()):
        return None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operands.__getitem__)
    kwargs = {name: "cpu" if name == "device" else value for name, value in kwargs.items()}
    if node.op == "call_method":
        values_by_node[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        values_by_node[node] = cast(Callable[..., Any], node.target)(*args, **kwargs)
    return values_by_node[node]


def _copy_mask(graph: fx.Graph, mask: fx.Node) -> fx.Node:
    """The mask in memory row by row, without what it repeats along its other dimensions."""
    example: Tensor = mask.meta["example_value"]
    repeats = [dim for dim, stride in enumerate(example.stride()[:-1]) if stride == 0]
    node = mask
    for dim in repeats:
        node = graph.call_method("narrow", (node, dim, 0, 1))
    node = graph.call_method("contiguous", (node,))
    sizes = [1 if dim in repeats else size for dim, size in enumerate(example.shape)]
    with detect_fake_mode([example]) or nullcontext():
        empty = torch.empty(sizes, dtype=example.dtype, device=example.device)
    if repeats:
        node = graph.call_method("expand", (node, *example.shape))
    node.meta["example_value"] = empty.expand(example.shape)
    return node
