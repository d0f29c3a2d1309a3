"""Element-wise ATen ops as Triton expressions with eager's semantics.

Half types are computed in fp32 (eager's opmath), NaN goes through min, max, clamp and relu,
division and square root are correctly rounded, transcendental functions are libdevice's (the code
nvcc gives eager). Ops that are absent here are not offered a kernel. Values between the ops of a
chain stay in fp32 and are not rounded to the half type, except by an explicit conversion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.nodes import Node, cast, constant, pointwise, rounded

__all__ = ["DIVISION", "HANDLERS", "Handler", "div", "maximum", "minimum", "sqrt"]

Handler: TypeAlias = Callable[
    [tuple[Any, ...], dict[str, Any], tuple[TensorSpec, ...]], tuple[Node | None, ...]
]

DIVISION = "tl.div_rn({0}, {1})"
_NAN = ", propagate_nan=tl.PropagateNan.ALL)"
_SIGMOID = "tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))"
_RELU6 = "tl.minimum(tl.maximum({0} + 3.0, 0.0" + _NAN + ", 6.0" + _NAN
_BETA, _KAPPA = (
    math.sqrt(2.0) * (2.0 / math.sqrt(math.pi)) * 0.5,
    0.044715,
)  # ATen/native/cuda/ActivationGeluKernel.cu

# sin, cos and tan are absent: their argument reduction reads a table in module memory, which the
# cubin scan refuses
_LIBDEVICE = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc", "rsqrt"),
    *("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)
FLOAT_UNARY = {
    **{name: f"libdevice.{name}({{0}})" for name in _LIBDEVICE},
    "sqrt": "tl.sqrt_rn({0})",
    "reciprocal": "tl.div_rn(1.0, {0})",
    "sigmoid": _SIGMOID,
    "silu": "tl.div_rn({0}, 1.0 + libdevice.exp(-{0}))",
    "hardsigmoid": "(" + _RELU6 + " * 0.16666667163372040)",
    "hardswish": "({0} * " + _RELU6 + " * 0.16666667163372040)",
    "mish": "({0} * libdevice.tanh(libdevice.log1p(libdevice.exp({0}))))",
}
ANY_UNARY = {
    "neg": "(-{0})",
    "abs": "tl.abs({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "trunc": "libdevice.trunc({0})",
    "round": "libdevice.rint({0})",
    "sign": "(({0} > 0).to(tl.float32) - ({0} < 0).to(tl.float32))",
}
BINARY = {
    "mul": "({0} * {1})",
    "maximum": "tl.maximum({0}, {1}" + _NAN,
    "minimum": "tl.minimum({0}, {1}" + _NAN,
    "bitwise_and": "({0} & {1})",
    "bitwise_or": "({0} | {1})",
    "bitwise_xor": "({0} ^ {1})",
    "atan2": "libdevice.atan2({0}, {1})",
    "xlogy": "tl.where({1} != {1}, {1}, tl.where({0} == 0, 0.0, {0} * libdevice.log({1})))",
    "sigmoid_backward": "({0} * (1.0 - {1}) * {1})",
    "tanh_backward": "({0} * (1.0 - {1} * {1}))",
}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
LOGICAL = {
    "logical_and": "({0} & {1})",
    "logical_or": "({0} | {1})",
    "logical_xor": "({0} ^ {1})",
    "logical_not": "({0} == 0)",
}
IDENTITY = (
    "clone.default",
    "alias.default",
    "detach.default",
    "contiguous.default",
    "lift_fresh_copy.default",
)


def div(top: Node, bottom: Node) -> Node:
    """fp32 division, correctly rounded (a plain `/` compiles to an approximation)."""
    return pointwise(DIVISION, top, bottom, dtype=torch.float32)


def sqrt(node: Node) -> Node:
    """fp32 square root, correctly rounded."""
    return pointwise("tl.sqrt_rn({0})", node, dtype=torch.float32)


def maximum(a: Node, b: Node, dtype: torch.dtype) -> Node:
    """The larger, NaN if either is."""
    return pointwise(
        BINARY["maximum"] if dtype.is_floating_point else "tl.maximum({0}, {1})", a, b, dtype=dtype
    )


def minimum(a: Node, b: Node, dtype: torch.dtype) -> Node:
    """The smaller, NaN if either is."""
    return pointwise(
        BINARY["minimum"] if dtype.is_floating_point else "tl.minimum({0}, {1})", a, b, dtype=dtype
    )


def _node(arg: Any, dtype: torch.dtype) -> Node:
    if isinstance(arg, Node):
        return cast(arg, dtype)
    if isinstance(arg, (bool, int, float)):
        return constant(arg, dtype)
    raise NotLowerableError(f"argument {arg!r} is neither a tensor nor a number")


def _common(args: tuple[Any, ...]) -> torch.dtype:
    """The dtype in which eager compares `args` (numbers and 0-dim tensors promote less than
    tensors).
    """
    plain = [
        torch.empty((0,) * len(a.shape), dtype=a.dtype) if isinstance(a, Node) and a.shape else a
        for a in args
    ]
    plain = [torch.empty((), dtype=a.dtype) if isinstance(a, Node) else a for a in plain]
    return torch.result_type(*plain) if len(plain) == 2 else plain[0].dtype


def _simple(template: str, count: int) -> Handler:
    """`count` leading operands in the result's dtype, one template."""

    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        if len(args) != count or kwargs:
            raise NotLowerableError(f"unexpected arguments {args[count:]!r} {kwargs!r}")
        dtype = outs[0].torch_dtype
        if dtype is torch.bool and "*" in template:
            raise NotLowerableError("arithmetic on bool")
        plain = template if dtype.is_floating_point else template.replace(_NAN, ")")
        return (
            pointwise(plain, *(_node(a, dtype) for a in args), dtype=dtype, shape=outs[0].shape),
        )

    return handle


def _floating(template: str, count: int) -> Handler:
    inner = _simple(template, count)

    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node | None, ...]:
        if not outs[0].torch_dtype.is_floating_point:
            raise NotLowerableError(f"{template} of dtype {outs[0].dtype}")
        return inner(args, kwargs, outs)

    return handle


def _compare(operator: str) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        common = _common(args)
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
    return _node(arg, common)


def _logical(template: str) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        operands = (_node(a, torch.bool) for a in args)
        return (pointwise(template, *operands, dtype=torch.bool, shape=outs[0].shape),)

    return handle


def _add(kind: str) -> Handler:
    """`a + alpha * b`, `a - alpha * b`, and for "rsub" `b - alpha * a`."""

    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        dtype = outs[0].torch_dtype
        if dtype is torch.bool:
            raise NotLowerableError("arithmetic on bool")
        alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
        first, second = (
            _node(a, dtype) for a in (reversed(args[:2]) if kind == "rsub" else args[:2])
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
    condition, yes, no = _node(args[0], torch.bool), _node(args[1], dtype), _node(args[2], dtype)
    return (
        pointwise("tl.where({0}, {1}, {2})", condition, yes, no, dtype=dtype, shape=outs[0].shape),
    )


def _masked_fill(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    x, mask, value = args
    return _where((mask, value, x), {}, outs)


def _clamp(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    dtype = outs[0].torch_dtype
    low = kwargs.get("min", args[1] if len(args) > 1 else None)
    high = kwargs.get("max", args[2] if len(args) > 2 else None)
    x = _node(args[0], dtype)
    x = x if low is None else maximum(x, _node(low, dtype), dtype)
    return (x if high is None else minimum(x, _node(high, dtype), dtype),)


def _clamp_max(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    return _clamp((args[0], None, args[1]), {}, outs)


def _relu(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    return _clamp((args[0], 0), {}, outs)


def _gelu(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    approximate = kwargs.get("approximate", args[1] if len(args) > 1 else "none")
    if approximate == "tanh":
        template = f"(0.5 * {{0}} * (1.0 + libdevice.tanh({_BETA!r} * ({{0}} + {_KAPPA!r} * {{0}} * {{0}} * {{0}}))))"
    else:
        template = f"({{0}} * 0.5 * (1.0 + libdevice.erf({{0}} * {math.sqrt(0.5)!r})))"
    return (pointwise(template, _node(args[0], outs[0].torch_dtype), dtype=outs[0].torch_dtype),)


def _gelu_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    """ATen/native/cuda/ActivationGeluKernel.cu: the gradient, then what gelu was given."""
    approximate = kwargs.get("approximate", args[2] if len(args) > 2 else "none")
    if approximate == "tanh":
        inner = f"libdevice.tanh({_BETA!r} * ({{1}} + {_KAPPA!r} * {{1}} * {{1}} * {{1}}))"
        slope = f"({_BETA!r} * (1.0 + {3 * _KAPPA!r} * {{1}} * {{1}}))"
        template = (
            f"({{0}} * (0.5 * (1.0 + {inner}) + 0.5 * {{1}} * (1.0 - {inner} * {inner}) * {slope}))"
        )
    else:
        density = f"(libdevice.exp(-0.5 * {{1}} * {{1}}) * {math.sqrt(0.5 / math.pi)!r})"
        template = f"({{0}} * (0.5 * (1.0 + libdevice.erf({{1}} * {math.sqrt(0.5)!r})) + {{1}} * {density}))"
    dtype = outs[0].torch_dtype
    return (
        pointwise(template, *(_node(a, dtype) for a in args[:2]), dtype=dtype, shape=outs[0].shape),
    )


def _elu_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    gradient, alpha, scale, inner, is_result, given = args
    below = "({1} + {2} * {3})" if is_result else "({2} * {3} * libdevice.exp({1} * {4}))"
    template = f"tl.where({{1}} <= 0, {{0}} * {{4}} * {below}, {{0}} * {{3}})"
    dtype = outs[0].torch_dtype
    return (
        pointwise(
            template,
            *(_node(a, dtype) for a in (gradient, given, alpha, scale, inner)),
            dtype=dtype,
            shape=outs[0].shape,
        ),
    )


def _pow(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    dtype, exponent = outs[0].torch_dtype, args[1]
    short: dict[float, str] = {
        0: "({0} * 0 + 1)",
        1: "({0})",
        2: "({0} * {0})",
        3: "({0} * {0} * {0})",
    }
    if (
        dtype.is_floating_point
    ):  # ATen/native/cuda/PowKernel.cu treats these apart; pow(NaN, 0) is 1
        short |= {
            0: "tl.where({0} == {0}, 1.0, 1.0)",
            0.5: "tl.sqrt_rn({0})",
            -0.5: "libdevice.rsqrt({0})",
        }
        short |= {-1: "tl.div_rn(1.0, {0})", -2: "tl.div_rn(1.0, {0} * {0})"}
    if exponent in short:
        return (
            pointwise(short[exponent], _node(args[0], dtype), dtype=dtype, shape=outs[0].shape),
        )
    if not dtype.is_floating_point:
        raise NotLowerableError(f"integer power {exponent}")
    pair = (_node(args[0], dtype), _node(exponent, dtype))
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
                *(_node(a, dtype) for a in args[:3]),
                value,
                dtype=dtype,
                shape=outs[0].shape,
            ),
        )

    return handle


def _with_scalars(template: str, defaults: tuple[float, ...], tensors: int = 1) -> Handler:
    """Leading tensors, then numbers with these defaults, as `{0}`, `{1}`, ... of the template."""

    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        dtype = outs[0].torch_dtype
        if kwargs or len(args) > tensors + len(defaults) or not dtype.is_floating_point:
            raise NotLowerableError(f"unexpected arguments {args!r} {kwargs!r}")
        numbers = (*args[tensors:], *defaults[len(args) - tensors :])
        nodes = [_node(a, dtype) for a in (*args[:tensors], *numbers)]
        return (pointwise(template, *nodes, dtype=dtype, shape=outs[0].shape),)

    return handle


_LEAKY_BACKWARD = _with_scalars("tl.where({1} > 0, {0}, {0} * {2})", (0.01,), tensors=2)


def _convert(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    return (rounded(args[0], outs[0].torch_dtype),)


def _full(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    dtype = outs[0].torch_dtype
    value = next((a for a in args if isinstance(a, (bool, int, float))), 0)
    if dtype in (torch.float16, torch.bfloat16):
        value = torch.tensor(value, dtype=dtype).item()
    return (pointwise("({0})", constant(value, dtype), dtype=dtype, shape=outs[0].shape),)


def _like(value: int) -> Handler:
    return lambda args, kwargs, outs: _full((value,), {}, outs)


def _identity(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    return (args[0],)


def _hardtanh(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    low, high = args[1:] + (-1.0, 1.0)[len(args) - 1 :]
    return _clamp((args[0], low, high), kwargs, outs)


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


def _activations() -> dict[str, Handler]:
    """Activations with numbers, and simple backwards (gradient first)."""
    elu = "tl.where({0} > 0, {0} * {2}, libdevice.expm1({0} * {3}) * ({1} * {2}))"
    softplus = (
        "tl.where({0} * {1} > {2}, {0}, tl.div_rn(libdevice.log1p(libdevice.exp({0} * {1})), {1}))"
    )
    silu_backward = "({0} * SIG * (1.0 + {1} * (1.0 - SIG)))".replace(
        "SIG", _SIGMOID.replace("{0}", "{1}")
    )
    return {
        "leaky_relu.default": _with_scalars("tl.where({0} > 0, {0}, {0} * {1})", (0.01,)),
        "elu.default": _with_scalars(elu, (1.0, 1.0, 1.0)),
        "softplus.default": _with_scalars(softplus, (1.0, 20.0)),
        "threshold_backward.default": _with_scalars(
            "tl.where({1} <= {2}, 0.0, {0})", (0.0,), tensors=2
        ),
        "silu_backward.default": _simple(silu_backward, 2),
    }


def _backwards() -> dict[str, Handler]:
    """Further backwards, as in ATen/native/cuda/Activation*.cu."""
    softplus = "tl.where({1} * {2} > {3}, {0}, tl.div_rn({0} * EXP, EXP + 1.0))".replace(
        "EXP", "libdevice.exp({1} * {2})"
    )
    return {
        "gelu_backward.default": _gelu_backward,
        "elu_backward.default": _elu_backward,
        "leaky_relu_backward.default": lambda args, kwargs, outs: _LEAKY_BACKWARD(
            args[:3], kwargs, outs
        ),  # then: is it a result
        "softplus_backward.default": _with_scalars(softplus, (1.0, 20.0), tensors=2),
        "hardtanh_backward.default": _with_scalars(
            "tl.where(({1} <= {2}) | ({1} >= {3}), 0.0, {0})", (-1.0, 1.0), tensors=2
        ),
        "hardsigmoid_backward.default": _simple(
            "tl.where(({1} > -3.0) & ({1} < 3.0), {0} * 0.16666667163372040, 0.0)", 2
        ),
        "native_dropout_backward.default": _with_scalars("({0} * {1} * {2})", (1.0,), tensors=2),
    }


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
        if right:
            template = f"({{0}} >> tl.where(({{1}} < 0) | ({{1}} > {most}), {most}, {{1}}))"
        else:
            template = f"tl.where(({{1}} < 0) | ({{1}} >= {bits}), 0, {{0}} << tl.where(({{1}} < 0) | ({{1}} >= {bits}), 0, {{1}}))"
        return (
            pointwise(template, *(_node(a, dtype) for a in args), dtype=dtype, shape=outs[0].shape),
        )

    return handle


def _arithmetic() -> dict[str, Handler]:
    table: dict[str, Handler] = {
        f"{name}.default": _floating(text, 1) for name, text in FLOAT_UNARY.items()
    }
    table |= {
        f"{name}.default": _floating(text, 1)
        for name, text in ANY_UNARY.items()
        if name not in ("neg", "abs")
    }
    table |= {f"{name}.default": _simple(ANY_UNARY[name], 1) for name in ("neg", "abs")}
    for name, text in BINARY.items():
        overloads = (
            ("Tensor", "Scalar")
            if name in ("mul", "bitwise_and", "bitwise_or", "bitwise_xor", "xlogy")
            else ("default",)
        )
        table |= {f"{name}.{overload}": _simple(text, 2) for overload in overloads}
    table |= {
        f"{name}.{o}": _add(name) for name in ("add", "sub", "rsub") for o in ("Tensor", "Scalar")
    }
    table |= {
        f"div.{overload}": _floating("tl.div_rn({0}, {1})", 2) for overload in ("Tensor", "Scalar")
    }
    table |= {
        "pow.Tensor_Scalar": _pow,
        "pow.Tensor_Tensor": _floating("libdevice.pow({0}, {1})", 2),
    }
    return table | {"addcmul.default": _addc("*"), "addcdiv.default": _addc("/")}


def _table() -> dict[str, Handler]:
    table = _arithmetic() | _activations() | _backwards()
    for name, operator in COMPARE.items():
        table |= {f"{name}.{overload}": _compare(operator) for overload in ("Tensor", "Scalar")}
    table |= {f"{name}.default": _logical(text) for name, text in LOGICAL.items()}
    table |= dict.fromkeys(IDENTITY, _identity)
    table |= {f"where.{o}": _where for o in ("self", "ScalarOther", "ScalarSelf", "Scalar")}
    table |= {f"masked_fill.{o}": _masked_fill for o in ("Scalar", "Tensor")}
    table |= {"clamp.default": _clamp, "clamp.Tensor": _clamp, "hardtanh.default": _hardtanh}
    table |= {f"clamp_min.{o}": _clamp for o in ("default", "Tensor")} | {
        f"clamp_max.{o}": _clamp_max for o in ("default", "Tensor")
    }
    table |= {"relu.default": _relu, "gelu.default": _gelu}
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
