"""The digest of a Dynamo graph: lets a warm process find its decision without tracing the graph
again.

It covers every operator, argument, attribute and input spec, and the modes that change what tracing
yields. A graph with anything it cannot name exactly has no digest (None with the reason), and is
then captured as if it were new.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.program import canonical_json, encode_arg, tensor_digest

__all__ = ["compute_graph_digest", "compute_graph_outline"]


class _CannotNameError(Exception):
    pass


def compute_graph_digest(
    module: fx.GraphModule, inputs: Sequence[Any], extra: Sequence[str] = ()
) -> str | Refusal:
    """sha256 over the graph, its inputs' specs, torch's version and modes, and `extra` (settings
    that matter).
    """
    try:
        body = {
            "graph": list(_describe_nodes(module)),
            "inputs": [_describe_input(item) for item in inputs],
            "modes": _read_modes(),
            # Another torch version traces the same graph to other ATen operators.
            "extra": [torch.__version__, *extra],
        }
    except _CannotNameError as problem:
        return Refusal(str(problem))
    # Canonical JSON: key order and spacing must not change the digest.
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()


def compute_graph_outline(module: fx.GraphModule) -> str:
    """sha256 over the kinds and names of the nodes: tells graphs of one program apart, in any
    process; not enough for a cache.
    """
    names = [
        # Names only: `str` of a function holds its address, which differs between processes.
        [node.op, node.name, getattr(node.target, "__name__", str(node.target))]
        for node in module.graph.nodes
    ]
    return hashlib.sha256(canonical_json(names).encode()).hexdigest()


def _describe_nodes(module: fx.GraphModule) -> Iterator[Any]:
    numbers: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        # Position instead of the name, which is no part of what a graph computes.
        numbers[node] = len(numbers)
        args = _describe_arg(node.args, numbers)
        # Sorted, because the order of keywords means nothing.
        kwargs = [[name, _describe_arg(node.kwargs[name], numbers)] for name in sorted(node.kwargs)]
        # A placeholder's target is its name.
        target = "" if node.op in ("placeholder", "output") else _name_target(node, module)
        yield [node.op, target, args, kwargs]


def _name_target(node: fx.Node, module: fx.GraphModule) -> Any:
    if node.op == "call_method":
        return str(node.target)
    if node.op == "get_attr":
        return _describe_attribute(module, str(node.target))
    if node.op == "call_function":
        name = _name_function(node.target)
        if name is not None:
            return name
    raise _CannotNameError(f"{node.op} {node.target!r}")


def _name_function(target: Any) -> str | None:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if not isinstance(
        target, (types.BuiltinFunctionType, types.FunctionType, types.BuiltinMethodType)
    ):
        return None
    module, name = target.__module__ or "builtins", target.__qualname__
    # A user's own function may change its body without changing its name: only torch and the
    # standard library are named.
    is_versioned = module.split(".")[0] in ("torch", "math", "operator", "_operator", "builtins")
    # "<lambda>" and "<locals>" name no function uniquely.
    return f"{module}.{name}" if is_versioned and "<" not in name else None


def _describe_attribute(module: fx.GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    # The body of a higher-order operator, such as `cond` or a checkpoint.
    if isinstance(value, fx.GraphModule):
        return list(_describe_nodes(value))
    # By content. The exact type, because a subclass or a fake tensor has none that can be hashed.
    if type(value) is torch.Tensor:
        return tensor_digest(value)
    raise _CannotNameError(f"attribute {target} of type {type(value).__name__}")


def _describe_arg(arg: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(arg, fx.Node):
        return {"node": numbers[arg]}
    if isinstance(arg, (tuple, list)):
        return [_describe_arg(item, numbers) for item in arg]
    if isinstance(arg, dict):
        return {"dict": [[str(key), _describe_arg(value, numbers)] for key, value in arg.items()]}
    if isinstance(arg, slice):
        # Tagged dicts, so that a slice and a list of its parts do not have one digest.
        return {"slice": [_describe_arg(part, numbers) for part in (arg.start, arg.stop, arg.step)]}
    if arg is Ellipsis:
        return {"ellipsis": 0}
    try:
        return encode_arg(arg)
    except ProgramError as problem:
        raise _CannotNameError(str(problem)) from problem


def _describe_input(item: Any) -> Any:
    if not isinstance(item, torch.Tensor) or item.layout != torch.strided:
        raise _CannotNameError(f"input of type {type(item).__name__}")
    # Its dtype and shape say nothing of the tensors inside, such as a quantised weight's.
    if is_traceable_wrapper_subclass_type(type(item)):
        raise _CannotNameError(f"input of type {type(item).__name__}")
    # One digest would stand for all sizes, and a decision holds for the sizes it was measured on.
    if any(isinstance(size, torch.SymInt) for size in (*item.shape, *item.stride())):
        raise _CannotNameError("dynamic shapes")
    # A parameter is static to a CUDA graph and an input is not.
    parameter = isinstance(item, torch.nn.Parameter)
    return [
        str(item.dtype),
        list(item.shape),
        list(item.stride()),
        # Without the index: a decision holds for every GPU of the machine's model.
        item.device.type,
        item.requires_grad,
        parameter,
    ]


def _read_modes() -> list[Any]:
    # Modes that decide which operators tracing yields, or how accurate they must be.
    autocast = [
        [kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))]
        for kind in ("cpu", "cuda")
    ]
    return [
        torch.is_grad_enabled(),
        autocast,
        str(torch.get_default_dtype()),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    ]
