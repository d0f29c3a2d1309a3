"""Checks indices, and divisors of integers, before code that Inductor compiled for a CPU uses them.

Eager raises IndexError for an index out of range, and RuntimeError for an integer divided by zero.
Inductor's C++ throws from inside a parallel loop, where nothing can catch it, or divides, and the
process ends. Here each index that is not in range by construction, and each divisor, goes through
one opaque operator first, which raises. Nothing is added on a GPU.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from torch_cudal1.core.refusal import Refusal

__all__ = [
    "IndexOutOfRangeError",
    "ZeroDivisorError",
    "add_class_checks",
    "cpu_index_checks",
    "find_lost_check",
    "has_indices",
    "raise_as_eager",
]

_NAME, _DIVISOR_NAME = "checked_index", "checked_divisor"
# An embedding indexes its table's first dimension; the operators with a dimension have it as
# argument 1 and the indices as argument 2. Only the operators with a list of indices count negative
# ones from the end.
_TABLE_OPERATORS = {"aten.embedding.default"}
_DIMENSION_OPERATORS = {
    "aten.index_select.default",
    "aten.gather.default",
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter.reduce",
    "aten.scatter_add.default",
    "aten.scatter_reduce.two",
    "aten.index_add.default",
    "aten.index_copy.default",
    "aten.index_fill.int_Scalar",
    "aten.index_fill.int_Tensor",
}
_LIST_OPERATORS = {"aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default"}
# The divisor is argument 1. Floor division is the first of them.
_DIVISIONS = {
    "aten.div.Tensor_mode",
    "aten.remainder.Tensor",
    "aten.remainder.Scalar_Tensor",
    "aten.fmod.Tensor",
}
_VIEWS = {
    "aten.view.default",
    "aten.reshape.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.expand.default",
    "aten.permute.default",
    "aten.slice.Tensor",
    "aten.clone.default",
    "aten._to_copy.default",
    "aten.repeat.default",
    "prims.convert_element_type.default",
}


# uint8 is not among them: ATen takes such a tensor for a mask.
_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8)
_INTEGERS = (*_INDICES, torch.uint8)


class IndexOutOfRangeError(IndexError):
    """Raised for an index that eager would refuse. Where the module's own forward runs after it
    (`raise_as_eager`), the caller gets eager's exception instead.
    """


class ZeroDivisorError(RuntimeError):
    """Raised for an integer divided by zero, as eager does; see IndexOutOfRangeError."""


def _get_operator() -> torch._ops.OpOverload:
    _define()
    operator: torch._ops.OpOverload = torch.ops.cudal1.checked_index.default
    return operator


@cache
def _define() -> torch.library.Library:
    # FRAGMENT: other modules define operators in the same namespace.
    library = torch.library.Library("cudal1", "FRAGMENT")
    library.define(
        f"{_NAME}(Tensor index, int low, int high) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
    )
    library.impl(_NAME, _check_index, "CPU")
    # Eager ends in a device-side assertion on a GPU too, and to look at a value would wait for it.
    library.impl(_NAME, lambda index, low, high: index.clone(), "CUDA")
    torch.library.register_fake(
        f"cudal1::{_NAME}", lambda index, low, high: torch.empty_like(index), lib=library
    )
    library.define(
        f"{_DIVISOR_NAME}(Tensor divisor) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
    )
    library.impl(_DIVISOR_NAME, _check_divisor, "CPU")
    library.impl(_DIVISOR_NAME, torch.clone, "CUDA")
    torch.library.register_fake(f"cudal1::{_DIVISOR_NAME}", torch.empty_like, lib=library)
    return library


def _check_index(index: torch.Tensor, low: int, high: int) -> torch.Tensor:
    if index.numel():
        least, most = (int(value) for value in index.aminmax())
        if least < low or most >= high:
            raise IndexOutOfRangeError(
                f"index out of range: {least if least < low else most} is not from {low} to {high - 1}"
            )
    # An operator may not hand its input on: PyTorch takes its results for fresh memory.
    return index.clone()


def _check_divisor(divisor: torch.Tensor) -> torch.Tensor:
    if not bool(divisor.all()):
        raise ZeroDivisorError("ZeroDivisionError")  # eager's own words
    return divisor.clone()


def raise_as_eager(
    compiled: Callable[..., Any], eager_forward: Callable[..., Any]
) -> Callable[..., Any]:
    """`compiled`, but an index out of range, or a divisor of zero, raises the exception that
    `eager_forward` raises.

    Safe to run again: the check comes before anything that the call writes.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except (IndexOutOfRangeError, ZeroDivisorError):
            return eager_forward(*args, **kwargs)

    return run


# --- in the ATen graphs that Inductor compiles


@cache
def cpu_index_checks() -> dict[str, Any]:
    """Inductor's options that put the checks into what it compiles for a CPU."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    _get_operator()
    # Inductor's caches tell passes apart by this id: code compiled before this file changed must
    # not be found.
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    class IndexChecks(CustomGraphPass):
        """The pass; Inductor's caches know it by its text."""

        def __call__(self, graph: fx.Graph) -> None:
            for node in list(graph.nodes):
                _check_indices_of(graph, node)
                _check_divisor_of(graph, node)

        def uuid(self) -> str:
            return digest

    return {"post_grad_custom_pre_pass": IndexChecks()}


def _check_indices_of(graph: fx.Graph, node: fx.Node) -> None:
    for index, size, from_the_end in _iter_indices(node):
        value = index.meta.get("val")
        if (
            not isinstance(value, torch.Tensor)
            or value.device.type != "cpu"
            or value.dtype in (torch.bool, torch.uint8)
        ):
            continue
        low, high = -size if from_the_end else 0, size
        # A check reads all indices, and most positions in models come from a range that is known.
        if _is_within(index, low, high):
            continue
        with graph.inserting_before(node):
            checked = graph.call_function(_get_operator(), (index, low, high))
        # Inductor's lowering reads shape and dtype of a node from here.
        checked.meta["val"] = value
        node.replace_input_with(index, checked)


def _check_divisor_of(graph: fx.Graph, node: fx.Node) -> None:
    if str(node.target) not in _DIVISIONS or not isinstance(node.args[1], fx.Node):
        return
    divisor, values = node.args[1], (node.meta.get("val"), node.args[1].meta.get("val"))
    # Integers divided by integers. A number that is not 0 is no node.
    if any(
        not isinstance(value, torch.Tensor)
        or value.device.type != "cpu"
        or value.dtype not in _INTEGERS
        for value in values
    ):
        return
    with graph.inserting_before(node):
        checked = graph.call_function(torch.ops.cudal1.checked_divisor.default, (divisor,))
    checked.meta["val"] = values[1]
    node.args = (node.args[0], checked, *node.args[2:])


def _iter_indices(node: fx.Node) -> Iterator[tuple[fx.Node, int, bool]]:
    """For each index of the node: the index, the size of the dimension that it indexes, and whether
    a negative value counts from the end.
    """
    name = str(node.target)
    if name in _TABLE_OPERATORS:
        yield from _iter_sized_index(node.args[1], _shape(node.args[0]), 0, False)
    elif name in _DIMENSION_OPERATORS:
        yield from _iter_sized_index(node.args[2], _shape(node.args[0]), node.args[1], False)
    elif name in _LIST_OPERATORS and isinstance(node.args[1], (list, tuple)):
        shape, dimension = _shape(node.args[0]), 0
        for index in node.args[1]:
            value = index.meta.get("val") if isinstance(index, fx.Node) else None
            is_mask = isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)
            yield from _iter_sized_index(index, shape, dimension, True)
            # A mask of n dimensions indexes n of them.
            dimension += value.ndim if is_mask and isinstance(value, torch.Tensor) else 1


def _iter_sized_index(
    index: Any, shape: tuple[Any, ...] | None, dimension: Any, from_the_end: bool
) -> Iterator[tuple[fx.Node, int, bool]]:
    if (
        isinstance(index, fx.Node)
        and shape
        and isinstance(dimension, int)
        and -len(shape) <= dimension < len(shape)
    ):
        size = shape[dimension]
        # A symbolic size is no constant that the operator could take.
        if isinstance(size, int):
            yield index, size, from_the_end


def _shape(node: Any) -> tuple[Any, ...] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _is_within(node: Any, low: int, high: int) -> bool:
    """Whether the values come from a constant or a range that lies in [low, high)."""
    # Views, copies and conversions leave the range of the values as it is.
    while isinstance(node, fx.Node) and str(node.target) in _VIEWS:
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return False
    name = str(node.target)
    if name == "prims.iota.default":
        start, step, count = node.kwargs.get("start", 0), node.kwargs.get("step", 1), node.args[0]
        ends = (
            (start, start + step * (count - 1))  # type: ignore[operator]
            if all(isinstance(n, int) for n in (start, step, count))
            else ()
        )
        return bool(ends) and all(low <= end < high for end in ends)  # type: ignore[operator]
    if name == "aten.arange.default" and isinstance(node.args[0], int):
        return low <= 0 and node.args[0] <= high
    return (
        name == "aten.full.default" and isinstance(node.args[1], int) and low <= node.args[1] < high
    )


# --- in Dynamo's graphs


def _find_class_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Calls of `one_hot` on a CPU. AOTAutograd decomposes them and drops their check of the class
    values.
    """
    one_hot = torch.nn.functional.one_hot
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target is one_hot]
    return [
        node
        for node in nodes
        if node.meta["example_value"].device.type == "cpu"
        and isinstance(_read_class_count(node), int)
    ]


def _read_class_count(node: fx.Node) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("num_classes")


def has_indices(module: fx.GraphModule) -> bool:
    """Whether any value in a Dynamo graph may be an index or a divisor of integers. A graph without
    any is compiled as torch.compile compiles it.
    """
    values = (node.meta.get("example_value") for node in module.graph.nodes)
    return any(isinstance(value, torch.Tensor) and value.dtype in _INTEGERS for value in values)


def find_lost_check(module: torch.nn.Module) -> Refusal | None:
    """A Refusal where a trace of this Dynamo graph would lose an error that eager raises."""
    if not isinstance(module, fx.GraphModule):
        return None
    if _find_class_nodes(module.graph):
        return Refusal("one_hot looks at the class values, and a kernel would not")
    # On a GPU eager ends in a device-side assertion, after which the process can use no GPU.
    if any(
        node.target in (torch.nn.functional.binary_cross_entropy, torch._C._nn.binary_cross_entropy)
        and node.meta["example_value"].device.type == "cpu"
        for node in module.graph.nodes
    ):
        return Refusal(
            "binary_cross_entropy looks for values outside of [0, 1], a kernel would not"
        )
    return None


def add_class_checks(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a Dynamo graph with a check of the class values; `module` itself where there are
    none.
    """
    if not _find_class_nodes(module.graph):
        return module
    checked_module = fx.GraphModule(module, copy.deepcopy(module.graph))
    checked_module.meta.update(module.meta)
    for node in _find_class_nodes(checked_module.graph):
        index = node.args[0]
        assert isinstance(index, fx.Node)
        with checked_module.graph.inserting_before(node):
            checked = checked_module.graph.call_function(
                _get_operator(), (index, 0, _read_class_count(node))
            )
        checked.meta["example_value"] = index.meta["example_value"]
        node.replace_input_with(index, checked)
    checked_module.recompile()
    return checked_module
