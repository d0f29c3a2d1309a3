"""Second derivatives of a compiled training step: AOTAutograd's backward has none, so the module's own forward provides them.

A hook on the compiled backward looks whether a graph of the gradients is being made (`create_graph=True`). Only then it runs the
module again and differentiates that; the compiled gradients are thrown away. An ordinary backward pays for one test.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from torch_cudal1.flat import Call, stand_in
from torch_cudal1.guard import ModuleGuard

__all__ = ["differentiable_twice"]


def differentiable_twice(call: Call, module: torch.nn.Module, held: ModuleGuard) -> Call:
    """`call`, which runs a compiled step of `module`, with gradients that can be differentiated again.

    `held` guards the module. For steps that draw no random numbers: the second run could not repeat them.
    """
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = call(args, kwargs)
        leaves = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
        nodes = [leaf.grad_fn if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        node = next((node for node in nodes if type(node).__name__ == "CompiledFunctionBackward"), None)
        if node is not None:
            places = [(number, leaf.output_nr) for number, (leaf, own) in enumerate(zip(leaves, nodes, strict=True)) if own is node]
            ours = weakref.ref(node)  # the node owns the hook: a reference back would keep both for ever

            def differentiate(_: Sequence[Any], grad_outputs: Sequence[Any]) -> Any:
                backward = ours()
                if backward is None or not torch.is_grad_enabled():
                    return None
                if not held.holds():
                    raise RuntimeError(f"the module changed since its forward ({held.why()}); differentiate before changing it")
                again = pytree.tree_leaves(_again(module, autocast)(*args, **kwargs))
                pairs = [(again[number], grad_outputs[place]) for number, place in places if grad_outputs[place] is not None]
                return _gradients(pairs, backward.next_functions)

            node.register_hook(differentiate)
        return output

    return run


def _gradients(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], edges: Sequence[tuple[Any, int]]) -> tuple[Any, ...]:
    """d(outputs)/d(edges), differentiable; None where an edge leads nowhere or the outputs do not depend on it."""
    wanted = [GradientEdge(node, number) for node, number in edges if node is not None]
    found = iter(
        torch.autograd.grad(
            [output for output, _ in pairs], wanted, [grad for _, grad in pairs], create_graph=True, allow_unused=True
        )
    )
    return tuple(None if node is None else next(found) for node, _ in edges)


def _again(module: torch.nn.Module, autocast: Sequence[tuple[str, bool, torch.dtype]]) -> Any:
    """A callable like the module in the autocast mode of the forward, on the same weights; buffers are copies: none is written."""
    copied = stand_in(module)
    for part in copied.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.detach().clone()

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for kind, enabled, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            return copied._call_impl(*args, **kwargs)

    return run
