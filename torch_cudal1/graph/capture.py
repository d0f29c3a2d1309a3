"""Captures ATen graphs with AOTAutograd: forward, backward or inference, functional, without decompositions.

`capture` only looks: it returns the graphs and leaves the caller's module untouched. `compile_with` is the same tracing with our
callables put in. Both partition a joint graph by the same rule, so the graphs that were looked at are the graphs that run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torch_cudal1.errors import NotLowerableError
from torch_cudal1.records import Kind

__all__ = ["CapturedGraph", "GraphCompiler", "capture", "compile_with", "is_dynamic"]

GraphCompiler: TypeAlias = Callable[[fx.GraphModule, Kind], Callable[..., Any]]  # the result takes one sequence of inputs


@dataclass(frozen=True)
class CapturedGraph:
    """One functional ATen graph. `static` are the placeholder positions that hold parameters and buffers."""

    kind: Kind
    module: fx.GraphModule
    static: frozenset[int]


def is_dynamic(inputs: Sequence[Any]) -> bool:
    """Whether any input is a symbolic integer or has a symbolic size."""
    return any(
        isinstance(item, torch.SymInt) or (isinstance(item, torch.Tensor) and any(isinstance(s, torch.SymInt) for s in item.shape))
        for item in inputs
    )


def capture(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[CapturedGraph, ...]:
    """The ATen graphs of `module` at `inputs` (real or fake tensors, in placeholder order): (inference,) or (forward, backward).

    Raises NotLowerableError when AOTAutograd cannot trace it; nothing of the caller's tracing state is changed.
    """
    static = _static_placeholders(module)
    found: list[CapturedGraph] = []

    def keep(graph: fx.GraphModule, kind: Kind) -> Any:
        if kind != "backward":  # that one was kept when the joint graph was cut
            found.append(CapturedGraph(kind, graph, _static_in(graph, static)))
        return graph.forward

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = _partition(joint, joint_inputs, **kwargs)
        found.append(CapturedGraph("backward", copy.deepcopy(backward), frozenset()))
        return forward, backward

    # A context of our own, with the caller's fake mode: AOTAutograd leaves notes in the context it runs in.
    mode = detect_fake_mode(list(inputs)) or FakeTensorMode()
    try:
        with tracing(TracingContext(mode)):
            _trace(copy.deepcopy(module), _fake(inputs, mode), keep, partition)
    except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
        raise NotLowerableError(f"AOTAutograd cannot trace it: {type(error).__name__}: {_first_line(error)}") from error
    return tuple(sorted(found, key=lambda graph: graph.kind == "backward"))


def compile_with(module: fx.GraphModule, inputs: Sequence[Any], compiler: GraphCompiler) -> Callable[..., Any]:
    """Trace `module` as `capture` does and let `compiler` provide the callable of each graph. Returns what Dynamo expects."""
    compiled: Callable[..., Any] = _trace(module, inputs, compiler, _partition)
    return compiled


def _trace(module: fx.GraphModule, inputs: Sequence[Any], compiler: GraphCompiler, partition: Callable[..., Any]) -> Any:
    def of(kind: Kind) -> Callable[..., Any]:
        def compile_graph(graph: fx.GraphModule, _: Sequence[Any]) -> Any:
            compiled = compiler(graph, kind)
            return make_boxed_func(lambda *args: compiled(args))

        return compile_graph

    return aot_module_simplified(
        module,
        list(inputs),
        fw_compiler=of("forward"),
        bw_compiler=of("backward"),
        inference_compiler=of("inference"),
        partition_fn=partition,
        decompositions={},
        keep_inference_input_mutations=False,
    )


def _partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **kwargs)
    return forward, backward


def _fake(inputs: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Static fakes of the inputs: AOTAutograd would give real tensors symbolic sizes in a context that Dynamo did not prepare."""
    return [
        mode.from_tensor(item, static_shapes=True) if isinstance(item, torch.Tensor) and not isinstance(item, FakeTensor) else item
        for item in inputs
    ]


def _static_placeholders(module: fx.GraphModule) -> frozenset[int]:
    """Positions of lifted parameters and buffers, by the mark Dynamo leaves on them."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return frozenset(i for i, node in enumerate(placeholders) if "_dynamo_static_input_type" in node.meta.get("tensor_dict", {}))


def _static_in(graph: fx.GraphModule, static: frozenset[int]) -> frozenset[int]:
    """The same positions in the ATen graph, by AOTAutograd's own numbering of plain inputs."""
    found = set()
    for position, node in enumerate(node for node in graph.graph.nodes if node.op == "placeholder"):
        index = getattr(node.meta.get("desc"), "idx", None)
        if index is None:
            index = position if "primals" in node.name or "arg" in node.name else None
        if index in static:
            found.add(position)
    return frozenset(found)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else ""
