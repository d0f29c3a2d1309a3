"""Second derivatives of a compiled training step: AOTAutograd's backward has none, so what was
compiled runs again in eager.

A hook on the compiled backward looks whether a graph of the gradients is being made
(`create_graph=True`). Only then it runs the module, or one graph of it, again and differentiates
that; the compiled gradients are thrown away. An ordinary backward pays for one test.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from torch_cudal1.graph.functional_module import Call, random_kept, stand_in
from torch_cudal1.runtime.guard import ModuleGuard

__all__ = ["differentiable_twice", "graph_differentiable_twice"]


def differentiable_twice(call: Call, module: torch.nn.Module, held: ModuleGuard) -> Call:
    """`call`, which runs a compiled step of `module`, with gradients that can be differentiated
    again.

    `held` guards the module. For steps that draw no random numbers: the second run could not repeat
    them.
    """
    modes = _autocast_modes()

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = call(args, kwargs)

        def again() -> Any:
            if not held.holds():
                raise RuntimeError(
                    f"the module changed since its forward ({held.why()}); differentiate before changing it"
                )
            return _in_modes(_copy_of(module)._call_impl, modes)(*args, **kwargs)

        _differentiate_by(output, again)
        return output

    return run


def graph_differentiable_twice(
    compiled: Callable[..., Any], graph: Callable[..., Any]
) -> Callable[..., Any]:
    """`compiled`, which a backend made of Dynamo's `graph`, with gradients that can be
    differentiated again.

    Where the graph writes to an input its gradients stay as they are; where it draws random
    numbers, or where an input was written to since, a second derivative raises RuntimeError:
    another run could not repeat the first.
    """
    modes = _autocast_modes()

    def run(*inputs: Any) -> Any:
        before = _versions(inputs)
        output = compiled(*inputs)
        if _versions(inputs) != before:
            return output

        def again() -> Any:
            if _versions(inputs) != before:
                raise RuntimeError(
                    "an input of the forward was written to since; differentiate before changing it"
                )
            on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
            with random_kept() as moved:
                found = _in_modes(graph, modes)(*inputs)
            if on_gpu is not None and not torch.equal(on_gpu, torch.cuda.get_rng_state()):
                torch.cuda.set_rng_state(on_gpu)
                moved.append("the GPU's generator")
            if moved:
                raise RuntimeError(
                    f"the forward draws from {moved[0]}: once it is compiled there are no second derivatives of it"
                )
            return found

        _differentiate_by(output, again)
        return output

    return run


def _differentiate_by(output: Any, again: Callable[[], Any]) -> None:
    """Where the compiled backward of `output` is to be differentiated, differentiate what `again`
    yields in its place.
    """
    leaves = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
    nodes = [leaf.grad_fn if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    node = next((node for node in nodes if type(node).__name__ == "CompiledFunctionBackward"), None)
    if node is None:
        return
    places = [
        (number, leaf.output_nr)
        for number, (leaf, own) in enumerate(zip(leaves, nodes, strict=True))
        if own is node
    ]
    ours = weakref.ref(node)  # the node owns the hook: a reference back would keep both for ever

    def differentiate(_: Sequence[Any], grad_outputs: Sequence[Any]) -> Any:
        backward = ours()
        if backward is None or not torch.is_grad_enabled():
            return None
        results = pytree.tree_leaves(again())
        pairs = [
            (results[number], grad_outputs[place])
            for number, place in places
            if grad_outputs[place] is not None
        ]
        return _gradients(pairs, backward.next_functions)

    node.register_hook(differentiate)


def _gradients(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], edges: Sequence[tuple[Any, int]]
) -> tuple[Any, ...]:
    """d(outputs)/d(edges), differentiable; None where an edge leads nowhere or the outputs do not
    depend on it.
    """
    wanted = [GradientEdge(node, number) for node, number in edges if node is not None]
    found = iter(
        torch.autograd.grad(
            [output for output, _ in pairs],
            wanted,
            [grad for _, grad in pairs],
            create_graph=True,
            allow_unused=True,
        )
    )
    return tuple(None if node is None else next(found) for node, _ in edges)


def _copy_of(module: torch.nn.Module) -> torch.nn.Module:
    """The module on the same weights; buffers are copies: none is written."""
    copied = stand_in(module)
    for part in copied.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.detach().clone()
    return copied


def _autocast_modes() -> list[tuple[str, bool, torch.dtype]]:
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]


def _in_modes(
    call: Callable[..., Any], modes: Sequence[tuple[str, bool, torch.dtype]]
) -> Callable[..., Any]:
    """`call` in the autocast modes of the forward."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for kind, enabled, dtype in modes:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            return call(*args, **kwargs)

    return run


def _versions(inputs: Sequence[Any]) -> list[int]:
    return [
        leaf._version
        for leaf in inputs
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
    ]
