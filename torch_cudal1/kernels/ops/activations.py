"""Activations and their backwards as Triton expressions, with the constants of ATen's CUDA kernels."""

from __future__ import annotations

import math
from typing import Any

from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.nodes import Node, pointwise
from torch_cudal1.kernels.ops.handlers import (
    PROPAGATE_NAN,
    Handler,
    as_node,
    clamp,
    make_floating,
    make_simple,
    make_with_scalars,
)

__all__ = ["FLOAT_UNARY", "HANDLERS"]

_SIGMOID = "tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))"
# NaN goes through both limits.
_RELU6 = "tl.minimum(tl.maximum({0} + 3.0, 0.0" + PROPAGATE_NAN + ", 6.0" + PROPAGATE_NAN
# The constants of ATen/native/cuda/ActivationGeluKernel.cu.
_BETA, _KAPPA = (
    math.sqrt(2.0) * (2.0 / math.sqrt(math.pi)) * 0.5,
    0.044715,
)


FLOAT_UNARY = {
    "sigmoid": _SIGMOID,
    "silu": "tl.div_rn({0}, 1.0 + libdevice.exp(-{0}))",
    # ATen multiplies by one sixth in fp32: a division would round otherwise.
    "hardsigmoid": "(" + _RELU6 + " * 0.16666667163372040)",
    "hardswish": "({0} * " + _RELU6 + " * 0.16666667163372040)",
    "mish": "({0} * libdevice.tanh(libdevice.log1p(libdevice.exp({0}))))",
}


def _relu(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    # Through `clamp`, which propagates NaN; a plain maximum would make 0 of it.
    return clamp((args[0], 0), {}, outs)


def _gelu(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    # ATen has two formulas, and they differ by more than rounding.
    approximate = kwargs.get("approximate", args[1] if len(args) > 1 else "none")
    if approximate == "tanh":
        template = f"(0.5 * {{0}} * (1.0 + libdevice.tanh({_BETA!r} * ({{0}} + {_KAPPA!r} * {{0}} * {{0}} * {{0}}))))"
    else:
        template = f"({{0}} * 0.5 * (1.0 + libdevice.erf({{0}} * {math.sqrt(0.5)!r})))"
    return (pointwise(template, as_node(args[0], outs[0].torch_dtype), dtype=outs[0].torch_dtype),)


def _gelu_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    """`gelu_backward`, of the gradient and gelu's input; formulas of
    ATen/native/cuda/ActivationGeluKernel.cu.
    """
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
        pointwise(
            template, *(as_node(a, dtype) for a in args[:2]), dtype=dtype, shape=outs[0].shape
        ),
    )


def _elu_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    gradient, alpha, scale, inner, is_result, operand = args
    below = "({1} + {2} * {3})" if is_result else "({2} * {3} * libdevice.exp({1} * {4}))"
    template = f"tl.where({{1}} <= 0, {{0}} * {{4}} * {below}, {{0}} * {{3}})"
    dtype = outs[0].torch_dtype
    return (
        pointwise(
            template,
            *(as_node(a, dtype) for a in (gradient, operand, alpha, scale, inner)),
            dtype=dtype,
            shape=outs[0].shape,
        ),
    )


_LEAKY_BACKWARD = make_with_scalars("tl.where({1} > 0, {0}, {0} * {2})", (0.01,), tensors=2)


def _hardtanh(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    low, high = args[1:] + (-1.0, 1.0)[len(args) - 1 :]
    return clamp((args[0], low, high), kwargs, outs)


def _activations() -> dict[str, Handler]:
    """Activations with numbers, and simple backwards (gradient first)."""
    elu = "tl.where({0} > 0, {0} * {2}, libdevice.expm1({0} * {3}) * ({1} * {2}))"
    # Above the threshold softplus is the identity, as in PyTorch: exp() would overflow.
    softplus = (
        "tl.where({0} * {1} > {2}, {0}, tl.div_rn(libdevice.log1p(libdevice.exp({0} * {1})), {1}))"
    )
    silu_backward = "({0} * SIG * (1.0 + {1} * (1.0 - SIG)))".replace(
        "SIG", _SIGMOID.replace("{0}", "{1}")
    )
    return {
        "leaky_relu.default": make_with_scalars("tl.where({0} > 0, {0}, {0} * {1})", (0.01,)),
        "elu.default": make_with_scalars(elu, (1.0, 1.0, 1.0)),
        "softplus.default": make_with_scalars(softplus, (1.0, 20.0)),
        # NaN is not at or below the threshold: the gradient passes, as in eager.
        "threshold_backward.default": make_with_scalars(
            "tl.where({1} <= {2}, 0.0, {0})", (0.0,), tensors=2
        ),
        "silu_backward.default": make_simple(silu_backward, 2),
    }


def _backwards() -> dict[str, Handler]:
    """Further backwards, as in ATen/native/cuda/Activation*.cu."""
    softplus = "tl.where({1} * {2} > {3}, {0}, tl.div_rn({0} * EXP, EXP + 1.0))".replace(
        "EXP", "libdevice.exp({1} * {2})"
    )
    return {
        "gelu_backward.default": _gelu_backward,
        "elu_backward.default": _elu_backward,
        # The last argument says whether the operand is the result; for a slope above 0 both have
        # one sign.
        "leaky_relu_backward.default": lambda args, kwargs, outs: _LEAKY_BACKWARD(
            args[:3], kwargs, outs
        ),
        "softplus_backward.default": make_with_scalars(softplus, (1.0, 20.0), tensors=2),
        "hardtanh_backward.default": make_with_scalars(
            "tl.where(({1} <= {2}) | ({1} >= {3}), 0.0, {0})", (-1.0, 1.0), tensors=2
        ),
        "hardsigmoid_backward.default": make_simple(
            "tl.where(({1} > -3.0) & ({1} < 3.0), {0} * 0.16666667163372040, 0.0)", 2
        ),
        "native_dropout_backward.default": make_with_scalars(
            "({0} * {1} * {2})", (1.0,), tensors=2
        ),
    }


HANDLERS: dict[str, Handler] = {
    **{f"{name}.default": make_floating(text, 1) for name, text in FLOAT_UNARY.items()},
    **_activations(),
    **_backwards(),
    "hardtanh.default": _hardtanh,
    "relu.default": _relu,
    "gelu.default": _gelu,
}
