"""Lowers a functional ATen graph to the canonical Program that is a region's identity, and raises
it back for rewriting.

Canonical means: values are numbered by a walk from the outputs, arguments first, so neither names
nor the order in which a model was built matter; dead code is gone. (A graph that draws random
numbers keeps its own order: the order is part of its result.) What has no data form is refused with
its reason: symbolic sizes, writes, sparse or quantised tensors, foreign operators.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.aten import CUSTOM_OPERATORS, is_functional, is_random, name_of
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.program import Aten, Call, Program, TensorSpec, Value, tensor_digest
from torch_cudal1.ir.records import Granularity, Kind, Region, Role
from torch_cudal1.runtime.operator import get_program, run_operator
from torch_cudal1.runtime.runner import to_fx

__all__ = ["LoweredRegion", "lower", "raise_to_fx"]

# A constant's bytes are hashed into the region's key and stored with the entry.
_MAX_CONSTANT_BYTES = 1 << 20  # larger literals are data, not part of a computation's identity
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.device,
)


@dataclass(frozen=True)
class LoweredRegion:
    """A region and how it sits in its graph: `order[i]` is the placeholder position of the region's
    input i.
    """

    region: Region
    order: tuple[int, ...]


def lower(
    module: fx.GraphModule,
    *,
    static: Iterable[int] = (),
    kind: Kind = "inference",
    granularity: Granularity = "whole",
    name: str = "",
    kernels: bool = False,
) -> LoweredRegion:
    """Lower `module` (meta["val"] on every node). `static` are placeholder positions of parameters
    and buffers.

    `kernels`: nested Programs (`cudal1::run`) may stand in the graph, as in a candidate's; a
    region's never holds one.

    Raises NotLowerableError with the reason.
    """
    writer = _Writer(module, kernels=kernels)
    program, order = writer.write()
    # A checkpointed part that runs again would draw other numbers than the forward did.
    if kind == "backward" and is_random_program(program):
        raise NotLowerableError(
            "the backward draws random numbers, which must be those of the forward"
        )
    # Roles tell parameters from inputs: a CUDA graph reads a parameter in place and copies an input
    # before each replay.
    static_positions = frozenset(static)
    roles: tuple[Role, ...] = tuple(
        "parameter" if position in static_positions else "input" for position in order
    )
    return LoweredRegion(Region(program, roles, kind, granularity, name), order)


def raise_to_fx(program: Program) -> fx.GraphModule:
    """The Program as an FX graph with meta["val"] (static fake tensors) on every node, ready for
    rewrite rules.
    """
    module = to_fx(program)
    # The Program's constants are real tensors in an otherwise fake graph.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = [
            torch.empty_strided(s.shape, s.strides, dtype=s.torch_dtype, device=s.device)
            for s in program.inputs
        ]
    # Rules ask for shapes only. An autograd graph of fakes would be built for nothing.
    with torch.no_grad():
        FakeTensorProp(module, mode).propagate(*inputs)
    return module


class _Writer:
    """One lowering: the numbering of values grows as nodes are visited."""

    def __init__(self, module: fx.GraphModule, *, kernels: bool = False) -> None:
        self._module = module
        self._placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
        self._numbers: dict[fx.Node, int] = {}
        self._parts: dict[fx.Node, tuple[int, ...]] = {}
        self._steps: list[Aten | Call] = []
        self._kernels = kernels

    def write(self) -> tuple[Program, tuple[int, ...]]:
        # Canonical order before anything is numbered: the numbers are part of the region's key.
        nodes = list(self._order_nodes())
        # Asked of the whole graph: an assertion has no users, so the walk from the outputs never
        # reaches it and it would be dropped in silence.
        if asserted := next((node for node in self._module.graph.nodes if _asserts(node)), None):
            raise NotLowerableError(
                f"it asserts something of values ({asserted.target}), which a kernel would not"
            )
        inputs = [node for node in nodes if node.op == "placeholder"]
        # Inputs come first, then constants, then results: the order in which a Program numbers
        # values.
        constants = [node for node in nodes if node.op == "get_attr"]
        payloads = {}
        for node in (*inputs, *constants):
            self._numbers[node] = len(self._numbers)
        names = []
        for node in constants:
            tensor = self._read_constant(node)
            # A constant is named by its content. Its attribute name differs between two builds of
            # one model.
            names.append(tensor_digest(tensor)[:32])
            payloads[names[-1]] = tensor
        self._next = len(self._numbers)
        for node in nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                self._steps.append(self._write_step(node))
        program = Program(
            inputs=tuple(_read_spec(node) for node in inputs),
            steps=tuple(self._steps),
            outputs=tuple(self._find_output(item) for item in _iter_leaves(self._output.args[0])),
            constants=tuple(names),
            payloads=payloads,
        )
        return program, tuple(self._placeholders.index(node) for node in inputs)

    def _order_nodes(self) -> Iterator[fx.Node]:
        """Nodes in canonical order: a walk from the outputs, producers first."""
        # The walk drops dead code, and does not depend on the order in which a model was built.
        live = list(_walk_postorder(self._output))
        if any(
            node.op == "call_function"
            and isinstance(node.target, torch._ops.OpOverload)
            and _is_random(node)
            for node in live
        ):
            # Random operators share one generator: another order gives each of them other numbers.
            live_nodes = set(live)
            live = [node for node in self._module.graph.nodes if node in live_nodes]
        yield from (node for node in live if node is not self._output)

    def _write_step(self, node: fx.Node) -> Aten | Call:
        # Only a candidate's graph may hold launches. A region is the computation that candidates
        # are compared with.
        if self._kernels and node.target is run_operator():
            return self._call(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise NotLowerableError(
                f"{getattr(node.target, '__name__', node.target)} is not an ATen operator"
            )
        target = name_of(node.target)
        # Another process may load an entry without the library that registered the operator.
        if target.partition(".")[0] not in ("aten", "prims") and target not in CUSTOM_OPERATORS:
            raise NotLowerableError(f"operator {target} belongs to another library")
        # A Program's values are immutable, so a write to an argument could not be expressed.
        if not is_functional(target):
            raise NotLowerableError(f"operator {target} writes to its arguments")
        value = node.meta["val"]
        many = isinstance(value, (tuple, list))
        # A result that no node reads may be a plain number, as the seeds of fused attention are.
        unread = _find_unread(node, len(value)) if many else frozenset[int]()
        for position, part in enumerate(value if many else (value,)):
            if position not in unread or isinstance(part, torch.Tensor):
                _check_value(part, node)
        count = len(value) if many else 1
        outs = tuple(range(self._next, self._next + count))
        self._next += count
        if many:
            self._parts[node] = outs
        else:
            self._numbers[node] = outs[0]
        # Sorted by name, so that the order in which a model passes keywords does not change the
        # key.
        kwargs = tuple(sorted((name, self._write_arg(arg)) for name, arg in node.kwargs.items()))
        return Aten(target, tuple(self._write_arg(arg) for arg in node.args), kwargs, outs, many)

    def _call(self, node: fx.Node) -> Call:
        operands, digest = node.args
        program = get_program(str(digest))
        outs = tuple(range(self._next, self._next + len(program.outputs)))
        self._next += len(outs)
        self._parts[node] = outs
        return Call(
            program, tuple(self._find_value(item).index for item in _iter_leaves(operands)), outs
        )

    def _write_arg(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self._find_value(arg)
        if isinstance(arg, (tuple, list)):
            return tuple(self._write_arg(item) for item in arg)
        # Before the plain types: a key with a symbolic size would serve one shape and claim to
        # serve all.
        if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise NotLowerableError("dynamic shapes: a size is symbolic")
        if arg is None or isinstance(
            arg,
            (
                bool,
                int,
                float,
                complex,
                str,
                torch.dtype,
                torch.layout,
                torch.memory_format,
                torch.device,
            ),
        ):
            return arg
        raise NotLowerableError(f"an argument of type {type(arg).__name__} has no data form")

    def _find_value(self, node: fx.Node) -> Value:
        if node.op == "call_function" and node.target is operator.getitem:
            source, position = node.args
            if source not in self._parts or not isinstance(position, int):
                raise NotLowerableError("an index into something that is not an operator's result")
            return Value(self._parts[source][position])  # type: ignore[index]
        return Value(self._numbers[node])

    def _find_output(self, item: Any) -> int | None:
        if item is None:
            return None
        if not isinstance(item, fx.Node):
            raise NotLowerableError(f"an output is a {type(item).__name__}, not a tensor")
        return self._find_value(item).index

    def _read_constant(self, node: fx.Node) -> torch.Tensor:
        value: Any = self._module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise NotLowerableError(
                f"attribute {node.target!r} is a {type(value).__name__}, not a tensor"
            )
        _check_value(value, node)
        # Checked before the tensor is hashed and copied into a payload.
        if value.numel() * value.element_size() > _MAX_CONSTANT_BYTES:
            raise NotLowerableError(
                f"constant {node.target!r} is larger than {_MAX_CONSTANT_BYTES} bytes"
            )
        # A payload is data: it must not keep the user's autograd graph alive.
        return value.detach()


def _asserts(node: fx.Node) -> bool:
    """Whether it raises for some values, and computes nothing."""
    return node.op == "call_function" and str(node.target).startswith(
        ("aten._assert_async", "aten._assert_scalar", "aten._functional_assert")
    )


def _is_random(node: fx.Node) -> bool:
    return node.target.namespace in ("aten", "prims") and is_random(  # type: ignore[union-attr]
        name_of(node.target), node.args, node.kwargs
    )


def _find_unread(node: fx.Node, count: int) -> frozenset[int]:
    """Positions of results that no live node reads. Some operators return plain numbers there, such
    as fused attention, which returns a seed for its backward.
    """
    read_indices = {
        # A getitem that is itself unread counts as no reader.
        user.args[1]
        for user in node.users
        if user.users and user.target is operator.getitem
    }
    return frozenset(range(count)) - read_indices


def _walk_postorder(root: fx.Node) -> Iterator[fx.Node]:
    """Producers before consumers, arguments left to right; iterative, since real graphs are deeper
    than Python's stack.
    """
    visited: set[fx.Node] = set()
    stack: list[tuple[fx.Node, Iterator[fx.Node]]] = [(root, iter(_list_argument_nodes(root)))]
    while stack:
        node, pending = stack[-1]
        child = next((child for child in pending if child not in visited), None)
        if child is None:
            stack.pop()
            if node not in visited:
                visited.add(node)
                yield node
        else:
            stack.append((child, iter(_list_argument_nodes(child))))


def _list_argument_nodes(node: fx.Node) -> list[fx.Node]:
    """Producers in argument order (`all_input_nodes` has no promised order)."""
    return [
        leaf
        # Sorted like the keywords in `_write_step`, or the order of the walk would depend on how they
        # were passed.
        for leaf in _iter_leaves((node.args, *(node.kwargs[name] for name in sorted(node.kwargs))))
        if isinstance(leaf, fx.Node)
    ]


def _iter_leaves(arg: Any) -> Iterator[Any]:
    if isinstance(arg, (tuple, list)):
        for item in arg:
            yield from _iter_leaves(item)
    else:
        yield arg


def _read_spec(node: fx.Node) -> TensorSpec:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise NotLowerableError(
            f"input {node.name} is a {type(value).__name__}, not a tensor (dynamic shapes)"
        )
    _check_value(value, node)
    return TensorSpec.of(value)


def _check_value(value: Any, node: fx.Node) -> None:
    if value is None:
        return
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
        raise NotLowerableError(f"{node.name} yields a number (dynamic shapes or data-dependent)")
    if not isinstance(value, torch.Tensor):
        raise NotLowerableError(f"{node.name} yields a {type(value).__name__}, not a tensor")
    if value.layout != torch.strided:
        raise NotLowerableError(
            f"{node.name} is {str(value.layout).removeprefix('torch.')}, only strided tensors have a data form"
        )
    if value.is_quantized:
        raise NotLowerableError(f"{node.name} is quantised")
    # `meta` tensors too: they have no data that could be compared.
    if value.device.type not in ("cpu", "cuda"):
        raise NotLowerableError(
            f"{node.name} is on {value.device.type}, only cpu and cuda are targets"
        )
    if any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
        raise NotLowerableError("dynamic shapes: a size is symbolic")
