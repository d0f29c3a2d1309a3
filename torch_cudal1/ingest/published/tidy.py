"""A traced graph without the copies that only in-place code makes: results written into fresh
memory are results.

    out = empty(...); filled = copy(out, product)    becomes    filled = product

A candidate may not say `empty` (memory that was never written could be read), and need not. Nothing
else of a graph is changed.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from torch_cudal1.ir.program import TensorSpec

__all__ = ["drop_copies"]

_COPY = torch.ops.aten.copy.default
_CLONE = torch.ops.aten.clone.default


def drop_copies(module: fx.GraphModule) -> None:
    """Replace every copy of a tensor into one of the same dtype, shape and strides by that tensor,
    in place.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not _COPY:
            continue
        source = node.args[1]
        # Only where nothing but the memory differs: a copy that casts, broadcasts or changes
        # strides is work.
        if isinstance(source, fx.Node) and TensorSpec.of(source.meta["val"]) == TensorSpec.of(
            node.meta["val"]
        ):
            with graph.inserting_before(node):
                node.replace_all_uses_with(_clone_unless_own(graph, source, node))
            graph.erase_node(node)


def _clone_unless_own(graph: fx.Graph, source: fx.Node, copy: fx.Node) -> fx.Node:
    """`source` where it is memory of its own, else a clone: an output must not be an input's or a
    constant's memory.
    """
    # An operator with several results is followed by `getitem`, which has no schema.
    maker = source.args[0] if source.target is operator.getitem else source
    target = maker.target if isinstance(maker, fx.Node) else None
    if isinstance(target, torch._ops.OpOverload) and not any(
        # A view (its schema marks the result as an alias) is another tensor's memory.
        result.alias_info
        for result in target._schema.returns
    ):
        return source
    clone = graph.call_function(_CLONE, (source,))
    # Later passes read shapes and dtypes from `meta["val"]`, which a new node does not have.
    clone.meta["val"] = copy.meta["val"]
    return clone
