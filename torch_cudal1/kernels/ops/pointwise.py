"""Element-wise ATen ops as Triton expressions with eager's semantics.

Half types are computed in fp32 (eager's opmath), NaN goes through min, max, clamp and relu,
division and square root are correctly rounded, transcendental functions are libdevice's (the code
nvcc gives eager). Ops that are absent here are not offered a kernel. Values between the ops of a
chain stay in fp32 and are not rounded to the half type, except by an explicit conversion.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.nodes import Node, cast, constant, pointwise, round_to
from torch_cudal1.kernels.ops import activations
from torch_cudal1.kernels.ops.handlers import (
    MAXIMUM,
    MINIMUM,
    Handler,
    as_node,
    clamp,
    make_floating,
    make_simple,
)

__all__ = ["ANY_UNARY", "FLOAT_UNARY", "HANDLERS"]

# sin, cos and tan are absent: their argument reduction reads a table in module memory, which the
# cubin scan refuses
_LIBDEVICE = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc", "rsqrt"),
    *("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)
# Square root and reciprocal are correctly rounded, as nvcc compiles eager's; a plain `/` compiles
# to an approximation.
FLOAT_UNARY = {
    **{name: f"libdevice.{name}({{0}})" for name in _LIBDEVICE},
    "sqrt": "tl.sqrt_rn({0})",
    "reciprocal": "tl.div_rn(1.0, {0})",
}
ANY_UNARY = {
    "neg": "(-{0})",
    "abs": "tl.abs({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "trunc": "libdevice.trunc({0})",
    # Halves go to the even number, as in eager.
    "round": "libdevice.rint({0})",
    # NaN compares false with both, so that its sign is 0.
    "sign": "(({0} > 0).to(tl.float32) - ({0} < 0).to(tl.float32))",
}
BINARY = {
    "mul": "({0} * {1})",
    # fp32's maximum and minimum in hardware drop NaN: the templates ask for it to be propagated.
    "maximum": MAXIMUM,
    "minimum": MINIMUM,
    "bitwise_and": "({0} & {1})",
    "bitwise_or": "({0} | {1})",
    "bitwise_xor": "({0} ^ {1})",
    "atan2": "libdevice.atan2({0}, {1})",
    "xlogy": "tl.where({1} != {1}, {1}, tl.where({0} == 0, 0.0, {0} * libdevice.log({1})))",
    "sigmoid_backward": "({0} * (1.0 - {1}) * {1})",
    "tanh_backward": "({0} * (1.0 - {1} * {1}))",
}
_OVERLOADS = {
    **dict.fromkeys(("mul", "bitwise_and", "bitwise_or", "bitwise_xor"), ("Tensor", "Scalar")),
    "xlogy": ("Tensor",),
}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
LOGICAL = {
    "logical_and": "({0} & {1})",
    "logical_or": "({0} | {1})",
    "logical_xor": "({0} ^ {1})",
    "logical_not": "({0} == 0)",
}
# A kernel copies nothing: what these operators copy is read where the result is used.
IDENTITY = (
    "clone.default",
    "alias.default",
    "detach.default",
    "contiguous.default",
    "lift_fresh_copy.default",
)


def _common(args: tuple[Any, ...]) -> torch.dtype:
    """The dtype in which eager compares `args` (numbers and 0-dim tensors promote less than
    tensors).
    """
    # Empty tensors stand for the operands: `result_type` asks for dtype and whether there are
    # dimensions.
    plain = [
        torch.empty((0,) * len(a.shape), dtype=a.dtype) if isinstance(a, Node) and a.shape else a
        for a in args
    ]
    plain = [torch.empty((), dtype=a.dtype) if isinstance(a, Node) else a for a in plain]
    return torch.result_type(*plain) if len(plain) == 2 else plain[0].dtype


def _compare(operator: str) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        # Numbers and tensors without dimensions promote less than tensors do: an fp16 tensor is
        # compared with a number in fp16.
        common = _common(args)
        # Booleans are compared as the numbers 0 and 1.
        common = torch.int32 if common is torch.bool else common
        template = f"({{0}} {operator} {{1}})"
        return (
            pointwise(
                template,
                *(_operand(a, common) for a in args),
                dtype=torch.bool,
                shape=outs[0].shape,
            ),
        )

    return handle


def _operand(arg: Any, common: torch.dtype) -> Node:
    # comparing a half tensor with a number: eager rounds the number to the half type first
    if not isinstance(arg, Node) and common in (torch.float16, torch.bfloat16):
        return constant(torch.tensor(arg, dtype=common).item(), common)
    return as_node(arg, common)


def _logical(template: str) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        operands = (as_node(a, torch.bool) for a in args)
        return (pointwise(template, *operands, dtype=torch.bool, shape=outs[0].shape),)

    return handle


def _add(kind: str) -> Handler:
    """`a + alpha * b`, `a - alpha * b`, and for "rsub" `b - alpha * a`."""

    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        dtype = outs[0].torch_dtype
        # ATen's sum of booleans is a logical or: another operator than this template.
        if dtype is torch.bool:
            raise NotLowerableError("arithmetic on bool")
        alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
        first, second = (
            as_node(a, dtype) for a in (reversed(args[:2]) if kind == "rsub" else args[:2])
        )
        if alpha != 1:
            second = pointwise("({0} * {1})", second, constant(alpha, dtype), dtype=dtype)
        template = "({0} + {1})" if kind == "add" else "({0} - {1})"
        return (pointwise(template, first, second, dtype=dtype, shape=outs[0].shape),)

    return handle


def _where(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    dtype = outs[0].torch_dtype
    condition, yes, no = (
        as_node(args[0], torch.bool),
        as_node(args[1], dtype),
        as_node(args[2], dtype),
    )
    return (
        pointwise("tl.where({0}, {1}, {2})", condition, yes, no, dtype=dtype, shape=outs[0].shape),
    )


def _fill_masked(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    x, mask, value = args
    return _where((mask, value, x), {}, outs)


def _clamp_max(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    return clamp((args[0], None, args[1]), {}, outs)


def _pow(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    dtype, exponent = outs[0].torch_dtype, args[1]
    # Eager multiplies for these exponents, so that pow() would round otherwise.
    short: dict[float, str] = {
        0: "({0} * 0 + 1)",
        1: "({0})",
        2: "({0} * {0})",
        3: "({0} * {0} * {0})",
    }
    # ATen/native/cuda/PowKernel.cu treats these exponents apart; pow(NaN, 0) is 1.
    if dtype.is_floating_point:
        short |= {
            0: "tl.where({0} == {0}, 1.0, 1.0)",
            0.5: "tl.sqrt_rn({0})",
            -0.5: "libdevice.rsqrt({0})",
        }
        short |= {-1: "tl.div_rn(1.0, {0})", -2: "tl.div_rn(1.0, {0} * {0})"}
    if exponent in short:
        return (
            pointwise(short[exponent], as_node(args[0], dtype), dtype=dtype, shape=outs[0].shape),
        )
    if not dtype.is_floating_point:
        raise NotLowerableError(f"integer power {exponent}")
    pair = (as_node(args[0], dtype), as_node(exponent, dtype))
    return (pointwise("libdevice.pow({0}, {1})", *pair, dtype=dtype, shape=outs[0].shape),)


def _addc(operator: str) -> Handler:
    """`addcmul` and `addcdiv`: self + value * (t1 op t2)."""

    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        dtype = outs[0].torch_dtype
        value = constant(kwargs.get("value", args[3] if len(args) > 3 else 1), dtype)
        template = (
            "({0} + {3} * ({1} * {2}))" if operator == "*" else "({0} + {3} * tl.div_rn({1}, {2}))"
        )
        return (
            pointwise(
                template,
                *(as_node(a, dtype) for a in args[:3]),
                value,
                dtype=dtype,
                shape=outs[0].shape,
            ),
        )

    return handle


def _convert(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    # An explicit conversion rounds; all other values of a chain stay in fp32.
    return (round_to(args[0], outs[0].torch_dtype),)


def _full(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    dtype = outs[0].torch_dtype
    value = next((a for a in args if isinstance(a, (bool, int, float))), 0)
    if dtype in (torch.float16, torch.bfloat16):
        # Eager rounds the number to the half type when it fills the tensor.
        value = torch.tensor(value, dtype=dtype).item()
    return (pointwise("({0})", constant(value, dtype), dtype=dtype, shape=outs[0].shape),)


def _like(value: int) -> Handler:
    return lambda args, kwargs, outs: _full((value,), {}, outs)


def _identity(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    return (args[0],)


def _bitwise_not(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    dtype = outs[0].torch_dtype
    return (pointwise("({0} == 0)" if dtype is torch.bool else "(~{0})", args[0], dtype=dtype),)


def _isnan(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    return (pointwise("({0} != {0})", args[0], dtype=torch.bool),)


def _isinf(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    return (
        pointwise('(tl.abs({0}) == float("inf"))', cast(args[0], torch.float32), dtype=torch.bool),
    )


def _shift(right: bool) -> Handler:
    """Counts outside of the type's bits leave its sign, or nothing."""

    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        dtype = outs[0].torch_dtype
        if dtype.is_floating_point or dtype is torch.bool or kwargs:
            raise NotLowerableError(f"a shift of {dtype}")
        bits = 8 * dtype.itemsize
        most = bits if dtype is torch.uint8 else bits - 1
        # A shift by more bits than the type has is poison in LLVM; ATen defines its result.
        if right:
            template = f"({{0}} >> tl.where(({{1}} < 0) | ({{1}} > {most}), {most}, {{1}}))"
        else:
            template = f"tl.where(({{1}} < 0) | ({{1}} >= {bits}), 0, {{0}} << tl.where(({{1}} < 0) | ({{1}} >= {bits}), 0, {{1}}))"
        return (
            pointwise(
                template, *(as_node(a, dtype) for a in args), dtype=dtype, shape=outs[0].shape
            ),
        )

    return handle


def _arithmetic() -> dict[str, Handler]:
    table: dict[str, Handler] = {
        f"{name}.default": make_floating(text, 1) for name, text in FLOAT_UNARY.items()
    }
    table |= {
        f"{name}.default": make_floating(text, 1)
        for name, text in ANY_UNARY.items()
        # Negation and absolute value keep integers; the other templates are written for floats.
        if name not in ("neg", "abs")
    }
    table |= {f"{name}.default": make_simple(ANY_UNARY[name], 1) for name in ("neg", "abs")}
    for name, text in BINARY.items():
        overloads = _OVERLOADS.get(name, ("default",))
        table |= {f"{name}.{overload}": make_simple(text, 2) for overload in overloads}
    table |= {
        f"{name}.{o}": _add(name) for name in ("add", "sub", "rsub") for o in ("Tensor", "Scalar")
    }
    table |= {
        f"div.{overload}": make_floating("tl.div_rn({0}, {1})", 2)
        for overload in ("Tensor", "Scalar")
    }
    table |= {
        "pow.Tensor_Scalar": _pow,
        "pow.Tensor_Tensor": make_floating("libdevice.pow({0}, {1})", 2),
    }
    return table | {"addcmul.default": _addc("*"), "addcdiv.default": _addc("/")}


def _table() -> dict[str, Handler]:
    table = _arithmetic() | activations.HANDLERS
    for name, operator in COMPARE.items():
        table |= {f"{name}.{overload}": _compare(operator) for overload in ("Tensor", "Scalar")}
    table |= {f"{name}.default": _logical(text) for name, text in LOGICAL.items()}
    table |= dict.fromkeys(IDENTITY, _identity)
    table |= {f"where.{o}": _where for o in ("self", "ScalarOther", "ScalarSelf", "Scalar")}
    table |= {f"masked_fill.{o}": _fill_masked for o in ("Scalar", "Tensor")}
    table |= {"clamp.default": clamp, "clamp.Tensor": clamp}
    table |= {f"clamp_min.{o}": clamp for o in ("default", "Tensor")} | {
        f"clamp_max.{o}": _clamp_max for o in ("default", "Tensor")
    }
    table |= dict.fromkeys(("_to_copy.default", "prims.convert_element_type.default"), _convert)
    table |= {"full.default": _full, "full_like.default": _full, "scalar_tensor.default": _full}
    table |= {
        "zeros_like.default": _like(0),
        "ones_like.default": _like(1),
        "zeros.default": _like(0),
        "ones.default": _like(1),
    }
    table |= {"bitwise_not.default": _bitwise_not}
    for right, names in (
        (True, ("__rshift__", "bitwise_right_shift")),
        (False, ("__lshift__", "bitwise_left_shift")),
    ):
        table |= {f"{names[0]}.{o}": _shift(right) for o in ("Scalar", "Tensor")}
        table |= {f"{names[1]}.{o}": _shift(right) for o in ("Tensor", "Tensor_Scalar")}
    return table | {"isnan.default": _isnan, "isinf.default": _isinf}


HANDLERS: dict[str, Handler] = _table()
