"""Takes seeds that fused attention yields without dropout out of a training step, before its joint
graph is cut in two.

        forward ── seed, offset ──> backward          backward(..., zeros, zeros, dropout 0)

PyTorch leaves their memory as it was, on the host or, while a CUDA graph is captured, on the
device; its backwards read them only with dropout (aten/src/ATen/native:
transformers/cuda/attention_backward.cu, its flash_attn/flash_api.cpp, cudnn/MHA.cpp). A forward
that kept them would have results that nothing can be compared with, and its backward inputs on
another device than the graph says. The backward gets zeros of its own instead.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from torch_cudal1.ir.ops import attention_names

__all__ = ["remove_undefined_seeds"]

_BACKWARDS = tuple(getattr(torch.ops.aten, name).default for name in attention_names.BACKWARDS)


def remove_undefined_seeds(joint: fx.GraphModule) -> None:
    """Give backwards of attention without dropout in `joint` (meta["val"] on every node) zeros in
    place of the forward's seeds.
    """
    # One node serves all backwards of the graph. It stands before the first of them.
    zeros: fx.Node | None = None
    for node in joint.graph.nodes:
        if (
            node.op != "call_function"
            or node.target not in _BACKWARDS
            or node.args[_find_position(node, "dropout_p")] != 0
        ):
            continue
        zeros = _insert_zeros(node) if zeros is None else zeros
        # Before the graph is cut: the partitioner then saves neither for the backward.
        for name in ("philox_seed", "philox_offset"):
            node.update_arg(_find_position(node, name), zeros)
    if zeros is not None:
        joint.recompile()


def _find_position(node: fx.Node, name: str) -> int:
    """The position of the argument `name` in the schema of the operator that `node` calls."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return next(
        place
        for place, argument in enumerate(node.target._schema.arguments)
        if argument.name == name
    )


def _insert_zeros(node: fx.Node) -> fx.Node:
    """A new node before `node`: a 0-dim int64 zero on its device. Without dropout no kernel reads
    it, so its type does not matter.
    """
    query = node.args[_find_position(node, "query")]
    assert isinstance(query, fx.Node)
    like = query.meta["val"]
    # On the query's device: the operator may yield a seed on the host, which a CUDA graph could not
    # read.
    form = {"dtype": torch.int64, "device": like.device, "pin_memory": False}
    with node.graph.inserting_before(node):
        zeros = node.graph.call_function(torch.ops.aten.full.default, ([], 0), form)
    with like.fake_mode:
        # The partitioner reads `meta` of every node, such as which pass it belongs to.
        zeros.meta = {**node.meta, "val": torch.ops.aten.full.default([], 0, **form)}
    zeros.meta.pop("tensor_meta", None)  # of `node`
    return zeros
