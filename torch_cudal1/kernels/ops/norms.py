"""layer, RMS, group, instance and batch norm: mean, variance of the deviations (two passes over
registers), scale.

The variance is a sum of squared deviations from the mean, never E[x^2] - E[x]^2, which cancels for
inputs far from zero. Bytes moved: one read and one write of the tensor when a row fits the
registers of one program or of a group of CTAs, else two reads (mean and variance, then
output) and one write.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.nodes import (
    Node,
    OnlineVariant,
    cast,
    constant,
    pointwise,
    reduce,
    reshape,
)
from torch_cudal1.kernels.ops.handlers import Handler, div

__all__ = ["HANDLERS", "moments"]

_F32 = torch.float32


def moments(x: Node, dims: tuple[int, ...], correction: float = 0.0) -> tuple[Node, Node, Node]:
    """Mean, deviation from it, and variance with `correction` degrees of freedom removed, over
    `dims`, in fp32.

    Where a row is read again for each reduction, mean and variance come from one pass (Welford's,
    as in eager). Where it stays in registers: the rounded sum leaves the mean off by some units;
    the sum of the deviations tells by how much, and corrects mean, deviation and variance in the
    same pass (Chan, Golub, LeVeque 1983, the corrected two-pass algorithm).
    """
    # Statistics of half types are fp32's, as in eager.
    x = cast(x, _F32)
    count = math.prod(x.shape[d] for d in dims)
    size = constant(count, _F32)
    # The rounded sum leaves the mean off by some units.
    rough = div(reduce("sum", x, dims), size)
    away = pointwise("({0} - {1})", x, rough, dtype=_F32)
    # The sum of the deviations tells by how much the mean is off; it corrects all three results
    # without another pass.
    off = div(reduce("sum", away, dims), size)
    squares = reduce("sum", pointwise("({0} * {0})", away, dtype=_F32), dims)
    # Rounding may leave a sum of squares below zero; NaN must stay NaN.
    spread = pointwise(
        "tl.maximum({0} - {1} * {1} * {2}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        squares,
        off,
        size,
        dtype=_F32,
    )
    mean = pointwise("({0} + {1})", rough, off, dtype=_F32)
    deviation = pointwise("({0} - {1})", away, off, dtype=_F32)
    # With fewer elements than degrees of freedom eager divides by 0 too.
    degrees = constant(max(0.0, count - correction), _F32)
    # Where a row is read again for each reduction, one pass over it gives both.
    center, squared = reduce("mean", x, dims), reduce("m2", x, dims)
    return (
        OnlineVariant(mean.shape, _F32, mean, center),
        OnlineVariant(x.shape, _F32, deviation, pointwise("({0} - {1})", x, center, dtype=_F32)),
        OnlineVariant(mean.shape, _F32, div(spread, degrees), div(squared, degrees)),
    )


def _rstd(variance: Node, eps: float) -> Node:
    # rsqrt as in eager's kernels: 1 / sqrt would round twice.
    return pointwise("libdevice.rsqrt({0} + {1})", variance, constant(eps, _F32), dtype=_F32)


def _affine(x: Node, weight: Node | None, bias: Node | None, dtype: torch.dtype) -> Node:
    if weight is not None:
        x = pointwise("({0} * {1})", x, cast(weight, _F32), dtype=_F32)
    if bias is not None:
        x = pointwise("({0} + {1})", x, cast(bias, _F32), dtype=_F32)
    # Values stay in fp32; only their nominal dtype changes. The store rounds.
    return pointwise("({0})", x, dtype=dtype)


def _scale(deviation: Node, rstd: Node) -> Node:
    return pointwise("({0} * {1})", deviation, rstd, dtype=_F32)


def _layer_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    x, shape, weight, bias, eps = args
    dims = tuple(range(len(x.shape) - len(shape), len(x.shape)))
    mean, deviation, variance = moments(x, dims)
    rstd = _rstd(variance, eps)
    return _affine(_scale(deviation, rstd), weight, bias, outs[0].torch_dtype), mean, rstd


def _rms_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    x, shape, weight, eps = (
        (*args, None)[:4] if len(args) > 3 else (*args, *(None,) * (4 - len(args)))
    )
    # The epsilon of fp32, in which half types are computed, as PyTorch has it: that of bfloat16 is
    # 65,536 times as large (benchmarks/LOG.md, 2026-11-26).
    eps = torch.finfo(_F32).eps if eps is None else eps
    dims = tuple(range(len(x.shape) - len(shape), len(x.shape)))
    wide = cast(x, _F32)
    squares = reduce("sum", pointwise("({0} * {0})", wide, dtype=_F32), dims)
    # The mean of squares is not centred: there is no mean whose rounding could be corrected.
    rstd = _rstd(div(squares, constant(math.prod(shape), _F32)), eps)
    return _affine(_scale(wide, rstd), weight, None, outs[0].torch_dtype), rstd


def _group_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    x, weight, bias, batch, channels, _, groups, eps = args
    inner = math.prod(x.shape[2:])
    grouped = reshape(x, (batch, groups, channels // groups, inner))
    mean, deviation, variance = moments(grouped, (2, 3))
    rstd = _rstd(variance, eps)
    # Eager folds mean and weight into a factor and an addend for channels of several elements only
    # (ATen/native/cuda/group_norm_kernel.cu).
    if inner > 1 and (weight is not None or bias is not None):
        each = [
            None if vector is None else reshape(vector, (1, groups, channels // groups, 1))
            for vector in (weight, bias)
        ]
        out = pointwise(
            "({0})",
            reshape(_scale_and_shift(grouped, mean, rstd, *each), x.shape),
            dtype=outs[0].torch_dtype,
        )
    else:
        scaled = reshape(_scale(deviation, rstd), x.shape)
        out = _affine(
            scaled, _view_channels(weight, x), _view_channels(bias, x), outs[0].torch_dtype
        )
    return out, reshape(mean, (batch, groups)), reshape(rstd, (batch, groups))


def _scale_and_shift(
    x: Node, mean: Node, rstd: Node, weight: Node | None, bias: Node | None
) -> Node:
    """`x * scale + shift` of a channel, as eager computes it. An infinite weight makes the shift
    infinite too, and the sum of infinities of two signs is NaN.

    Source: ATen/native/cuda/group_norm_kernel.cu, where a group's mean and a channel's weight
    become a factor and an addend first.
    """
    scale = (
        rstd if weight is None else pointwise("({0} * {1})", rstd, cast(weight, _F32), dtype=_F32)
    )
    if bias is None:
        shift = pointwise("(-{0} * {1})", scale, mean, dtype=_F32)
    else:
        shift = pointwise(
            "libdevice.fma(-{0}, {1}, {2})", scale, mean, cast(bias, _F32), dtype=_F32
        )
    # The kernels are compiled without contraction: eager's fused multiply-add is asked for by name.
    return pointwise("libdevice.fma({0}, {1}, {2})", cast(x, _F32), scale, shift, dtype=_F32)


def _view_channels(vector: Node | None, x: Node) -> Node | None:
    return None if vector is None else reshape(vector, (x.shape[1],) + (1,) * (len(x.shape) - 2))


def _batch_stats(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    """`_native_batch_norm_legit.no_stats`: statistics of the batch, which is also instance norm on
    a (1, N*C, ...) view.
    """
    x, weight, bias, training, _, eps = args
    if not training:
        raise NotLowerableError("batch norm without statistics and not in training")
    dims = (0, *range(2, len(x.shape)))
    mean, deviation, variance = moments(x, dims)
    rstd = _rstd(variance, eps)
    out = _affine(
        _scale(deviation, rstd),
        _view_channels(weight, x),
        _view_channels(bias, x),
        outs[0].torch_dtype,
    )
    return out, reshape(mean, (x.shape[1],)), reshape(rstd, (x.shape[1],))


def _batch_training(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node, ...]:
    """`_native_batch_norm_legit_functional`: statistics of the batch, and the running ones moved
    towards them.
    """
    x, weight, bias, running_mean, running_variance, training, momentum, eps = args
    if not training:
        raise NotLowerableError("batch norm of running statistics that also yields them")
    dims, count = (0, *range(2, len(x.shape))), math.prod(x.shape) // x.shape[1]
    mean, deviation, variance = moments(x, dims)
    rstd = _rstd(variance, eps)
    out = _affine(
        _scale(deviation, rstd),
        _view_channels(weight, x),
        _view_channels(bias, x),
        outs[0].torch_dtype,
    )
    # The running variance takes the unbiased estimate, the output the biased one, as in PyTorch.
    unbiased = pointwise(
        "({0} * {1})", variance, constant(count / max(1, count - 1), _F32), dtype=_F32
    )
    vectors = [reshape(node, (x.shape[1],)) for node in (mean, rstd, mean, unbiased)]
    shares = constant(momentum, _F32), constant(1 - momentum, _F32)
    running = [
        pointwise("({0} * {2} + {1} * {3})", new, cast(old, _F32), *shares, dtype=_F32)
        for new, old in zip(vectors[2:], (running_mean, running_variance), strict=True)
    ]
    typed_running = [
        pointwise("({0})", node, dtype=spec.torch_dtype)
        for node, spec in zip(running, outs[3:], strict=True)
    ]
    return out, vectors[0], vectors[1], *typed_running


def _batch_running(
    args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
) -> tuple[Node | None, ...]:
    """`_native_batch_norm_legit_no_training`: running statistics, element-wise; its two empty
    results are not produced.
    """
    x, weight, bias, mean, variance, _, eps = args
    # In eager's order: folding statistics into a factor and an addend is not exact for infinite
    # parameters.
    deviation = pointwise("({0} - {1})", cast(x, _F32), _cast_channels(mean, x), dtype=_F32)
    scaled = _scale(deviation, _rstd(_cast_channels(variance, x), eps))
    return (
        _affine(scaled, _view_channels(weight, x), _view_channels(bias, x), outs[0].torch_dtype),
        None,
        None,
    )


def _cast_channels(vector: Node, x: Node) -> Node:
    return cast(reshape(vector, (x.shape[1],) + (1,) * (len(x.shape) - 2)), _F32)


HANDLERS: dict[str, Handler] = {
    "native_layer_norm.default": _layer_norm,
    "_fused_rms_norm.default": _rms_norm,
    "native_group_norm.default": _group_norm,
    "_native_batch_norm_legit.no_stats": _batch_stats,
    "_native_batch_norm_legit_functional.default": _batch_training,
    "_native_batch_norm_legit_no_training.default": _batch_running,
}
