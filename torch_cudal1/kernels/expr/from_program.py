"""Reads a fusion group's reference Program as tensor expressions: ATen steps in, output nodes with
their exact specs out.

Shapes, dtypes and strides come from running each op on fake tensors, so they are PyTorch's own. An
op without a handler, a dtype or an aliasing that the kernels cannot reproduce raises
NotLowerableError with the reason. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.aten import overload
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.kernels.expr import views
from torch_cudal1.kernels.expr.nodes import COMPUTE, NARROW_DTYPES, Leaf, Map, Node, View
from torch_cudal1.kernels.ops.handlers import Handler

__all__ = ["Expressions", "Handlers", "Output", "TracedProgram", "read_expressions"]

# By family, then by operator.
Handlers: TypeAlias = Mapping[str, Mapping[str, Handler]]

# Results of these operators stay within the range of an 8-bit type: there is nothing to wrap.
_IN_RANGE = frozenset(
    {
        *(
            f"bitwise_{name}.{kind}"
            for name in ("and", "or", "xor")
            for kind in ("Tensor", "Scalar")
        ),
        *(
            "__rshift__.Scalar",
            "__rshift__.Tensor",
            "bitwise_right_shift.Tensor",
            "bitwise_right_shift.Tensor_Scalar",
            "stack.default",
        ),
    }
)
# Of a number or an empty result, which no handler has an expression for.
_NO_TENSOR = TensorSpec("int64", (), (), "cpu")
# A larger kernel runs out of registers long before it runs out of bandwidth.
_MAX_PROGRAM_STEPS = 96


@dataclass(frozen=True)
class Output:
    """An output value of the reference: its number there, its expression, its spec."""

    value: int
    node: Node
    spec: TensorSpec


@dataclass(frozen=True)
class TracedProgram:
    """The distinct outputs, the specs of all leaves by value number, and the family of the template
    that serves them.
    """

    outputs: tuple[Output, ...]
    leaves: Mapping[int, TensorSpec]
    family: str


@dataclass(frozen=True)
class Expressions:
    """The distinct outputs, the specs of all leaves by value number, and the families whose
    operators they are made of.
    """

    outputs: tuple[Output, ...]
    leaves: Mapping[int, TensorSpec]
    families: frozenset[str]


def read_expressions(program: Program, handlers: Handlers) -> Expressions:
    """The tensor expressions of a reference Program of ATen steps, whose operators have `handlers`
    by family. Raises NotLowerableError with the reason.
    """
    leaves = _read_leaves(program)
    nodes: dict[int, Node | None] = {}
    for value, spec in leaves.items():
        nodes[value] = Leaf(spec.shape, spec.torch_dtype, value, spec.strides)
    specs, roots, families = dict(leaves), {value: value for value in leaves}, set()
    if len(program.steps) > _MAX_PROGRAM_STEPS:
        raise NotLowerableError(
            f"{len(program.steps)} steps; at most {_MAX_PROGRAM_STEPS} fit one kernel"
        )
    # Fake tensors give PyTorch's own shapes, dtypes and strides, without memory or a GPU.
    with FakeTensorMode() as mode:
        fakes = {value: _make_fake(spec) for value, spec in leaves.items()}
        for step in program.steps:
            if not isinstance(step, Aten):
                raise NotLowerableError(f"a step of kind {type(step).__name__}")
            family, handler, name = _find_handler(step.target, handlers)
            families.add(family)
            results = _run_fake(step, fakes, mode)
            outs = tuple(
                TensorSpec.of(result) if isinstance(result, torch.Tensor) else _NO_TENSOR
                for result in results
            )
            args = tuple(_bind(arg, nodes) for arg in step.args)
            results_nodes = handler(
                args, {k: _bind(v, nodes) for k, v in step.kwargs if v is not None}, outs
            )
            results_nodes = (
                results_nodes if name in _IN_RANGE else tuple(map(_wrap_around, results_nodes))
            )
            # Handlers and the operator must agree on the number of results.
            for value, fake, spec, node in zip(
                step.outs, results, outs, results_nodes, strict=True
            ):
                fakes[value], specs[value], nodes[value] = fake, spec, node
                # An alias has its source's root: two outputs of one root would share memory in
                # eager.
                roots[value] = roots[step.args[0].index] if name in views.ALIASING else value
    outputs = _read_outputs(program, nodes, specs, roots)
    return Expressions(outputs, leaves, frozenset(families))


def _wrap_around(node: Node | None) -> Node | None:
    """The node wrapped to the range of an 8-bit integer, as eager's arithmetic wraps; kernels compute
    in 32 bits.
    """
    # Values in memory and views of them are in range by their type.
    if node is None or isinstance(node, (Leaf, View)) or node.dtype not in NARROW_DTYPES:
        return node
    # An 8-bit float has far fewer bits than the fp32 that a chain is computed in: eager rounds each
    # step.
    if node.dtype.is_floating_point:
        raise NotLowerableError(
            f"a step that yields {node.dtype}: it would have to be rounded to that"
        )
    # Computed in 32 bits: the low byte is what eager's arithmetic leaves, with its sign for int8.
    template = "({0} & 255)" if node.dtype is torch.uint8 else "((({0} + 128) & 255) - 128)"
    return Map(node.shape, node.dtype, template, (node,))


def _read_leaves(program: Program) -> dict[int, TensorSpec]:
    specs = list(program.inputs) + [
        TensorSpec.of(program.payloads[name]) for name in program.constants
    ]
    for position, spec in enumerate(specs):
        # Constants may be on another device: the executor moves payloads to the GPU.
        if position < len(program.inputs) and spec.device != "cuda":
            raise NotLowerableError(
                f"input {position} is on {spec.device!r}; these kernels read CUDA memory only"
            )
        # Nothing is computed of an empty tensor, and a grid of no programs cannot be launched.
        if spec.torch_dtype not in COMPUTE or spec.numel == 0:
            raise NotLowerableError(f"input {position} is {spec.dtype} of shape {spec.shape}")
    return {
        position: TensorSpec(s.dtype, s.shape, s.strides, "cuda")
        for position, s in enumerate(specs)
    }


def _find_handler(target: str, handlers: Handlers) -> tuple[str, Handler, str]:
    name = target.removeprefix("aten.")
    # Views come last: a template may express a view operator of its own.
    for family, table in (*handlers.items(), ("elementwise", views.HANDLERS)):
        if name in table:
            return family, table[name], name
    raise NotLowerableError(f"no kernel expression for {target}")


def _make_fake(spec: TensorSpec) -> torch.Tensor:
    # The strides too: PyTorch derives the layout of results from those of the operands.
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.torch_dtype, device=spec.device)


def _run_fake(
    step: Aten, fakes: Mapping[int, torch.Tensor], mode: FakeTensorMode
) -> tuple[torch.Tensor, ...]:
    op = overload(step.target)
    # Handlers take positional arguments by their place: a positional one given by name would be
    # missed.
    named = {argument.name for argument in op._schema.arguments if argument.kwarg_only}
    if unusual := [key for key, _ in step.kwargs if key not in named]:
        raise NotLowerableError(
            f"{step.target} is given {unusual} by name; the handlers read them by position"
        )
    args, kwargs = (
        (_bind(arg, fakes) for arg in step.args),
        {k: _bind(v, fakes) for k, v in step.kwargs},
    )
    try:
        result = op(*args, **kwargs)
    # What the operator itself refuses no kernel can serve: the message is the reason.
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise NotLowerableError(f"{step.target} refuses these inputs: {error}") from error
    return tuple(result) if step.many else (result,)


def _bind(arg: Any, values: Mapping[int, Any]) -> Any:
    if isinstance(arg, Value):
        bound = values[arg.index]
        if bound is None:
            raise NotLowerableError(f"value {arg.index} is an empty result")
        return bound
    return tuple(_bind(item, values) for item in arg) if isinstance(arg, (tuple, list)) else arg


def _read_outputs(
    program: Program,
    nodes: Mapping[int, Node | None],
    specs: Mapping[int, TensorSpec],
    roots: Mapping[int, int],
) -> tuple[Output, ...]:
    # An output that is listed twice is written once.
    values = dict.fromkeys(value for value in program.outputs if value is not None)
    inputs = len(program.inputs) + len(program.constants)
    if (
        not values
        # A kernel writes fresh memory: an output that is an input's memory in eager would not see
        # what the caller writes there later.
        or any(roots[value] < inputs for value in values)
        or len({roots[v] for v in values}) < len(values)
    ):
        raise NotLowerableError("an output shares memory with an input or with another output")
    outputs = []
    for value in values:
        node, spec = nodes[value], specs[value]
        # Such as the seeds of attention without dropout, whose memory PyTorch leaves as it was.
        if node is None:
            raise NotLowerableError(
                f"output {value} ({spec.dtype} of shape {spec.shape}) is a result that no kernel yields"
            )
        # A kernel writes each element once: an output with gaps would have memory that nothing
        # writes.
        if spec.numel == 0 or not _is_dense(spec) or spec.device != "cuda" or not _is_written(spec):
            raise NotLowerableError(
                f"output {value} is {spec}: empty, not dense, not on CUDA or of a dtype not handled"
            )
        outputs.append(Output(value, node, spec))
    return tuple(outputs)


def _is_written(spec: TensorSpec) -> bool:
    # Half types are rounded by the store; 8-bit types would need a rounding of their own.
    return spec.torch_dtype in COMPUTE and spec.torch_dtype not in NARROW_DTYPES


def _is_dense(spec: TensorSpec) -> bool:
    expected = 1
    # Dense in any order of dimensions: outputs keep the strides that eager gives them.
    for stride, size in sorted(
        (stride, size) for stride, size in zip(spec.strides, spec.shape, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
