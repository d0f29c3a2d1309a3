"""Captures one call of a module as regions: through Dynamo, then AOTAutograd, then lowered to
canonical Programs.

Nothing is decided here, and none of the user's code runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.graph.capture import CapturedGraph, TracedModule, trace
from torch_cudal1.graph.lower import LoweredRegion, lower
from torch_cudal1.graph.module_call import ModuleCall, capture_module_call
from torch_cudal1.ir.records import Region

__all__ = ["capture_call_graphs", "capture_regions", "get_examples", "lower_captured", "trace_call"]


def capture_regions(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> tuple[Region, ...]:
    """The regions of `module(*args, **kwargs)` in the present modes, without deciding anything.
    Raises NotLowerableError.
    """
    return tuple(
        lower_captured(graph, module).region
        for graph in capture_call_graphs(module, args, kwargs or {})[1].graphs
    )


def capture_call_graphs(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[ModuleCall, TracedModule]:
    """The call, and its ATen graphs. Raises NotLowerableError, also for what a measurement of the
    call could not undo.
    """
    captured = capture_module_call(module, args, kwargs)
    return captured, trace_call(captured)


def trace_call(captured: ModuleCall) -> TracedModule:
    """The ATen graphs of a captured call. Raises as `capture_call_graphs`."""
    traced = trace(captured.graph, captured.inputs)
    # A trial of the whole call puts back what it writes. A replaced storage could not be put back.
    if traced.replaces_memory:
        raise NotLowerableError(
            "its forward gives a tensor other memory (`.data = ...`, `set_`), which a kernel would not repeat"
        )
    return traced


def lower_captured(graph: CapturedGraph, module: torch.nn.Module) -> LoweredRegion:
    """A captured graph as a region, named after the module's class and the kind of graph. Raises
    NotLowerableError.
    """
    return lower(
        graph.module,
        static=graph.static,
        kind=graph.kind,
        name=f"{type(module).__name__}.{graph.kind}",
    )


def get_examples(
    item: LoweredRegion, graph: CapturedGraph, captured: ModuleCall
) -> list[torch.Tensor] | None:
    """The user's real tensors in the region's order; None for a backward graph, whose inputs exist
    only inside a step.
    """
    # A region numbers its inputs by first use, a graph by placeholder.
    origins = [graph.origins[position] for position in item.order]
    numbers = [origin for origin in origins if isinstance(origin, int)]
    return (
        # Detached: evaluation must not extend the user's autograd graph.
        [captured.inputs[number].detach() for number in numbers]
        if len(numbers) == len(origins)
        else None
    )
