"""Takes seeds that fused attention yields without dropout out of a training step, before its joint graph is cut in two.

        forward ── seed, offset ──> backward          backward(..., zeros, zeros, dropout 0)

PyTorch leaves their memory as it was, on the host or, while a CUDA graph is captured, on the device; its backward reads them only
`if (use_dropout)` (attention_backward.cu). A forward that kept them would have results that nothing can be compared with, and its
backward inputs on another device than the graph says. The backward gets zeros of its own instead. That goes for the "efficient"
operators only: what the others' backwards read is not known here.
"""

from __future__ import annotations

import torch
import torch.fx as fx

__all__ = ["without_undefined_seeds"]

_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
_PLACES = {argument.name: place for place, argument in enumerate(_BACKWARD._schema.arguments)}


def without_undefined_seeds(joint: fx.GraphModule) -> None:
    """Give backwards of attention without dropout in `joint` (meta["val"] on every node) zeros in place of the forward's seeds."""
    zeros: fx.Node | None = None
    for node in joint.graph.find_nodes(op="call_function", target=_BACKWARD):
        if node.args[_PLACES["dropout_p"]] != 0:
            continue
        zeros = _zeros_before(node) if zeros is None else zeros
        for name in ("philox_seed", "philox_offset"):
            node.update_arg(_PLACES[name], zeros)
    if zeros is not None:
        joint.recompile()


def _zeros_before(node: fx.Node) -> fx.Node:
    """A new node with one number of the seeds' type, where `node` runs."""
    query = node.args[_PLACES["query"]]
    assert isinstance(query, fx.Node)
    like = query.meta["val"]
    form = {"dtype": torch.int64, "device": like.device, "pin_memory": False}
    with node.graph.inserting_before(node):
        made = node.graph.call_function(torch.ops.aten.full.default, ([], 0), form)
    with like.fake_mode:
        made.meta = {**node.meta, "val": torch.ops.aten.full.default([], 0, **form)}
    made.meta.pop("tensor_meta", None)  # of `node`
    return made
