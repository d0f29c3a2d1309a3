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

from torch_cudal1.graph.functional_module import Call, copy_sharing_tensors, preserve_random_state
from torch_cudal1.runtime.guard import ModuleGuard

__all__ = ["allow_double_backward", "allow_graph_double_backward"]


def allow_double_backward(call: Call, module: torch.nn.Module, guard: ModuleGuard) -> Call:
    """`call`, which runs a compiled step of `module`, with gradients that can be differentiated
    again.

    `guard` guards the module. For steps that draw no random numbers: the second run could not repeat
    them.
    """
    # Read at the forward's binding: the backward may run outside of the autocast block.
    modes = _read_autocast_modes()

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = call(args, kwargs)

        def run_eager() -> Any:
            # Gradients of another module than the one that ran would be wrong in silence.
            if not guard.holds():
                raise RuntimeError(
                    f"the module changed since its forward ({guard.explain_difference()}); differentiate before changing it"
                )
            return _wrap_in_autocast(_copy_with_own_buffers(module)._call_impl, modes)(
                *args, **kwargs
            )

        _install_eager_backward(output, run_eager)
        return output

    return run


def allow_graph_double_backward(
    compiled: Callable[..., Any], graph: Callable[..., Any]
) -> Callable[..., Any]:
    """`compiled`, which a backend made of Dynamo's `graph`, with gradients that can be
    differentiated again.

    Where the graph writes to an input its gradients stay as they are; where it draws random
    numbers, or where an input was written to since, a second derivative raises RuntimeError:
    another run could not repeat the first.
    """
    modes = _read_autocast_modes()

    def run(*inputs: Any) -> Any:
        # A training forward may write to an input in place, and then a second run would start from
        # what the first one wrote. The version counter is what PyTorch's own saved tensors check.
        versions = _list_version_counters(inputs)
        output = compiled(*inputs)
        # The graph itself wrote: its gradients stay as the compiler made them.
        if _list_version_counters(inputs) != versions:
            return output

        def run_eager() -> Any:
            if _list_version_counters(inputs) != versions:
                raise RuntimeError(
                    "an input of the forward was written to since; differentiate before changing it"
                )
            # `preserve_random_state` covers the CPU's generators only. The GPU's state is read only
            # if CUDA runs already, as reading it would initialise CUDA.
            on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
            with preserve_random_state() as consumed_generators:
                results = _wrap_in_autocast(graph, modes)(*inputs)
            if on_gpu is not None and not torch.equal(on_gpu, torch.cuda.get_rng_state()):
                torch.cuda.set_rng_state(on_gpu)
                consumed_generators.append("the GPU's generator")
            # The second run would draw other numbers than the first, for instance another dropout
            # mask.
            if consumed_generators:
                raise RuntimeError(
                    f"the forward draws from {consumed_generators[0]}: once it is compiled there are no second derivatives of it"
                )
            return results

        _install_eager_backward(output, run_eager)
        return output

    return run


def _install_eager_backward(output: Any, run_eager: Callable[[], Any]) -> None:
    """Where the compiled backward of `output` is to be differentiated, differentiate what `run_eager`
    yields in its place.
    """
    leaves = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
    nodes = [leaf.grad_fn if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    # `CompiledFunction` is the name of AOTAutograd's `autograd.Function`; its class is made anew
    # for each graph, so it is recognised by name.
    node = next((node for node in nodes if type(node).__name__ == "CompiledFunctionBackward"), None)
    if node is None:
        return
    outputs = [
        (number, leaf.output_nr)
        for number, (leaf, grad_node) in enumerate(zip(leaves, nodes, strict=True))
        if grad_node is node
    ]
    # The node owns the hook. A reference back from the hook would be a cycle through C++, which
    # Python's garbage collector does not see, and keep both for ever.
    weak_node = weakref.ref(node)

    def differentiate(_: Sequence[Any], grad_outputs: Sequence[Any]) -> Any:
        backward = weak_node()
        # Autograd runs a backward in grad mode only under `create_graph=True`.
        if backward is None or not torch.is_grad_enabled():
            return None
        results = pytree.tree_leaves(run_eager())
        pairs = [
            (results[number], grad_outputs[output_number])
            for number, output_number in outputs
            if grad_outputs[output_number] is not None
        ]
        return _compute_gradients(pairs, backward.next_functions)

    node.register_hook(differentiate)


def _compute_gradients(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], edges: Sequence[tuple[Any, int]]
) -> tuple[Any, ...]:
    """d(outputs)/d(edges), differentiable; None where an edge leads nowhere or the outputs do not
    depend on it.
    """
    # Edges, not tensors: the inputs of the compiled function may be non-leaf tensors of which only
    # the graph knows.
    next_edges = [GradientEdge(node, number) for node, number in edges if node is not None]
    gradients = iter(
        torch.autograd.grad(
            [output for output, _ in pairs],
            next_edges,
            [grad for _, grad in pairs],
            create_graph=True,
            # A compiled backward gives None for an input that no output depends on.
            allow_unused=True,
        )
    )
    return tuple(None if node is None else next(gradients) for node, _ in edges)


def _copy_with_own_buffers(module: torch.nn.Module) -> torch.nn.Module:
    """The module on the same weights; buffers are copies: none is written."""
    # The second run must not update running statistics a second time.
    copy = copy_sharing_tensors(module)
    for part in copy.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.detach().clone()
    return copy


def _read_autocast_modes() -> list[tuple[str, bool, torch.dtype]]:
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]


def _wrap_in_autocast(
    call: Callable[..., Any], modes: Sequence[tuple[str, bool, torch.dtype]]
) -> Callable[..., Any]:
    """`call` in the autocast modes of the forward."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for kind, enabled, dtype in modes:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            return call(*args, **kwargs)

    return run


def _list_version_counters(inputs: Sequence[Any]) -> list[int]:
    return [
        leaf._version
        for leaf in inputs
        # Inference tensors have no version counter: reading it raises.
        if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
    ]
