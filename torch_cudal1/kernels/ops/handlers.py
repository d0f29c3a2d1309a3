"""The parts of ATen handlers: operands in a compute type, templates over them, and arithmetic with
eager's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.nodes import Node, cast, constant, pointwise

__all__ = [
    "DIVISION",
    "MAXIMUM",
    "MINIMUM",
    "PROPAGATE_NAN",
    "Handler",
    "as_node",
    "clamp",
    "div",
    "make_floating",
    "make_simple",
    "make_with_scalars",
    "maximum",
    "minimum",
    "sqrt",
]

# A handler takes nodes, not tensors: it expresses an operator, and computes nothing.
Handler: TypeAlias = Callable[
    [tuple[Any, ...], dict[str, Any], tuple[TensorSpec, ...]], tuple[Node | None, ...]
]

# Printers compare templates with this text to recognise a division.
DIVISION = "tl.div_rn({0}, {1})"
PROPAGATE_NAN = ", propagate_nan=tl.PropagateNan.ALL)"
MAXIMUM = "tl.maximum({0}, {1}" + PROPAGATE_NAN
MINIMUM = "tl.minimum({0}, {1}" + PROPAGATE_NAN


def div(top: Node, bottom: Node) -> Node:
    """fp32 division, correctly rounded (a plain `/` compiles to an approximation)."""
    return pointwise(DIVISION, top, bottom, dtype=torch.float32)


def sqrt(node: Node) -> Node:
    """fp32 square root, correctly rounded."""
    return pointwise("tl.sqrt_rn({0})", node, dtype=torch.float32)


def maximum(a: Node, b: Node, dtype: torch.dtype) -> Node:
    """The larger, NaN if either is."""
    return pointwise(
        MAXIMUM if dtype.is_floating_point else "tl.maximum({0}, {1})", a, b, dtype=dtype
    )


def minimum(a: Node, b: Node, dtype: torch.dtype) -> Node:
    """The smaller, NaN if either is."""
    return pointwise(
        MINIMUM if dtype.is_floating_point else "tl.minimum({0}, {1})", a, b, dtype=dtype
    )


def as_node(arg: Any, dtype: torch.dtype) -> Node:
    if isinstance(arg, Node):
        return cast(arg, dtype)
    if isinstance(arg, (bool, int, float)):
        return constant(arg, dtype)
    raise NotLowerableError(f"argument {arg!r} is neither a tensor nor a number")


def make_simple(template: str, count: int) -> Handler:
    """`count` leading operands in the result's dtype, one template."""

    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        # An argument that the template does not know, such as a rounding mode, would be ignored.
        if len(args) != count or kwargs:
            raise NotLowerableError(f"unexpected arguments {args[count:]!r} {kwargs!r}")
        dtype = outs[0].torch_dtype
        if dtype is torch.bool and "*" in template:
            raise NotLowerableError("arithmetic on bool")
        # Integers have no NaN to propagate.
        plain = template if dtype.is_floating_point else template.replace(PROPAGATE_NAN, ")")
        return (
            pointwise(plain, *(as_node(a, dtype) for a in args), dtype=dtype, shape=outs[0].shape),
        )

    return handle


def make_floating(template: str, count: int) -> Handler:
    inner = make_simple(template, count)

    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node | None, ...]:
        # The templates are written for floats.
        if not outs[0].torch_dtype.is_floating_point:
            raise NotLowerableError(f"{template} of dtype {outs[0].dtype}")
        return inner(args, kwargs, outs)

    return handle


def make_with_scalars(template: str, defaults: tuple[float, ...], tensors: int = 1) -> Handler:
    """Leading tensors, then numbers with these defaults, as `{0}`, `{1}`, ... of the template."""

    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        dtype = outs[0].torch_dtype
        if kwargs or len(args) > tensors + len(defaults) or not dtype.is_floating_point:
            raise NotLowerableError(f"unexpected arguments {args!r} {kwargs!r}")
        numbers = (*args[tensors:], *defaults[len(args) - tensors :])
        nodes = [as_node(a, dtype) for a in (*args[:tensors], *numbers)]
        return (pointwise(template, *nodes, dtype=dtype, shape=outs[0].shape),)

    return handle


def clamp(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    dtype = outs[0].torch_dtype
    low = kwargs.get("min", args[1] if len(args) > 1 else None)
    high = kwargs.get("max", args[2] if len(args) > 2 else None)
    x = as_node(args[0], dtype)
    # The upper limit comes last: with low above high the result is high, as PyTorch documents it.
    x = x if low is None else maximum(x, as_node(low, dtype), dtype)
    return (x if high is None else minimum(x, as_node(high, dtype), dtype),)
