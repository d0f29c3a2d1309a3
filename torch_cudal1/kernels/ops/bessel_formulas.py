"""The formulas of `ir.ops.bessel` as Triton functions, which any kernel may call; computed in
float64, as there.

A program of a kernel takes as many steps as its worst element needs: 40 to 200 for most, 1,300 for
the smallest float32.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_cudal1.ir.ops.bessel import (
    LAST_EXPONENT,
    MAX_GAUSSIAN_WIDTH,
    MIN_RESOLVED_WIDTH,
    SERIES,
    STEP,
)
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.kernels.expr.nodes import Node, cast, pointwise
from torch_cudal1.kernels.ops.handlers import Handler

__all__ = ["FUNCTIONS", "HANDLERS"]

_F32 = torch.float32
# Printed from the same coefficients as the reference, so that both are one formula.
_TERMS = "\n".join(
    line
    for coefficient in SERIES
    for line in (f"    gamma += {coefficient!r} * power", "    power = power / (y * y)")
)
_PRODUCT = " * ".join(f"(1.0 + {number}.0 / z)" for number in range(1, 8))
# Everything is computed in float64, as in `ir.ops.bessel`: steps and limits are chosen for
# float64's round-off.
FUNCTIONS = f"""
@triton.jit
def log_bessel_i(order, x):
    one = tl.full([1], 1.0, tl.float64)
    x, order = x * one, order * one
    x, order = tl.broadcast(x, order)
    served = (x > 0) & (x < float("inf")) & (order >= 0) & (order < float("inf"))
    v = tl.where(served, order, one)
    at = tl.where(served, x, one)
    a = 2.0 * v + 1.0
    t = at / (0.5 * a + libdevice.hypot(0.5 * a, at))
    width = 1.0 / tl.sqrt(a * (1.0 + t * t))
    tail = {LAST_EXPONENT} / a + 1.2
    near = 12.0 * width
    far = libdevice.sinh(near)
    rise = 2.0 * libdevice.sinh(0.5 * near) * libdevice.sinh(0.5 * near)
    low, high = rise - t * far, rise + t * far
    sure = width < {MAX_GAUSSIAN_WIDTH}
    before = tl.where(sure | (a * (-t * far / (1.0 + low) - libdevice.log1p(low)) <= -38.0), near, tail)
    after = tl.where(sure | (a * (t * far / (1.0 + high) - libdevice.log1p(high)) <= -38.0), near, tail)
    step = tl.minimum(0.5 * width, {STEP})
    count = tl.where(width < {MIN_RESOLVED_WIDTH}, 0.0, libdevice.ceil((before + after) / step))
    total = tl.zeros_like(step)
    for number in range(0, tl.max(count).to(tl.int32) + 1):
        d = number * step - before
        far = libdevice.sinh(d)
        half = libdevice.sinh(0.5 * d)
        above = 2.0 * half * half + t * far
        term = libdevice.exp(a * (t * far / (1.0 + above) - libdevice.log1p(above)))
        total += tl.where(count >= number, term, 0.0)
    z = v + 0.5
    y = z + 8.0
    gamma = (z + 7.5) * libdevice.log1p(8.0 / z) - libdevice.log({_PRODUCT}) - y + 0.91893853320467274
    power = 1.0 / y
{_TERMS}
    peak = v * libdevice.log(t) + 0.5 * libdevice.log(a * (t / at)) + at * t - gamma - 0.57236494292470009
    found = peak + libdevice.log(tl.where(width < {MIN_RESOLVED_WIDTH}, 2.5066282746310002 * width, total * step))
    edge = tl.where(x == 0, tl.where(order == 0, 0.0, float("-inf")), tl.where(x == float("inf"), float("inf"), float("-inf")))
    edge = tl.where((order == float("inf")) & (x == float("inf")), float("nan"), edge)
    return tl.where(served, found, tl.where((order >= 0) & (x >= 0), edge, float("nan"))).to(tl.float32)


@triton.jit
def acosh_of_1_plus(y):
    return tl.where(y < float("inf"), libdevice.log1p(y + tl.sqrt(y) * tl.sqrt(y + 2.0)), float("inf"))


@triton.jit
def log_bessel_k(order, x):
    one = tl.full([1], 1.0, tl.float64)
    x, order = x * one, tl.abs(order * one)
    x, order = tl.broadcast(x, order)
    served = (x > 0) & (x < float("inf")) & (order < float("inf"))
    v = tl.where(served, order, one)
    at = tl.where(served, x, one)
    r = libdevice.hypot(v, at)
    gap = at * (at / (r + v))
    width = 1.0 / tl.sqrt(r)
    near = 12.0 * width
    rise = 2.0 * libdevice.sinh(0.5 * near) * libdevice.sinh(0.5 * near)
    sure = width < {MAX_GAUSSIAN_WIDTH}
    after = tl.where(sure | (-r * rise - v * (libdevice.sinh(near) - near) <= -38.0), near, float("inf"))
    after = tl.minimum(after, acosh_of_1_plus({LAST_EXPONENT} / r))
    before = tl.where(sure | (-gap * rise + v * (-near - libdevice.expm1(-near)) <= -38.0), near, float("inf"))
    before = tl.minimum(before, tl.minimum({LAST_EXPONENT} / v + 1.0, acosh_of_1_plus({LAST_EXPONENT} / gap)))
    step = tl.minimum(0.5 * width, {STEP})
    count = tl.where(width < {MIN_RESOLVED_WIDTH}, 0.0, libdevice.ceil((before + after) / step))
    total = tl.zeros_like(step)
    for number in range(0, tl.max(count).to(tl.int32) + 1):
        d = number * step - before
        half = libdevice.sinh(0.5 * d)
        rise = 2.0 * half * half
        term = tl.where(d > 0, -r * rise - v * (libdevice.sinh(d) - d), -gap * rise + v * (d - libdevice.expm1(d)))
        total += tl.where(count >= number, libdevice.exp(term), 0.0)
    peak = v * libdevice.log((v + r) / at) - r - 0.69314718055994531
    found = peak + libdevice.log(tl.where(width < {MIN_RESOLVED_WIDTH}, 2.5066282746310002 * width, total * step))
    edge = tl.where(x == float("inf"), tl.where(order == float("inf"), float("nan"), float("-inf")), float("inf"))
    return tl.where(served, found, tl.where((x >= 0) & (order >= 0), edge, float("nan"))).to(tl.float32)

"""


def _make_call(name: str) -> Handler:
    def handle(
        args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[TensorSpec, ...]
    ) -> tuple[Node, ...]:
        # The functions convert to float64 themselves; results are rounded to fp32 once, at their
        # end.
        order, x = (cast(arg, _F32) for arg in args)
        return (pointwise(name + "({0}, {1})", order, x, dtype=outs[0].torch_dtype),)

    return handle


HANDLERS: dict[str, Handler] = {
    f"cudal1.{name}.default": _make_call(name) for name in ("log_bessel_i", "log_bessel_k")
}
