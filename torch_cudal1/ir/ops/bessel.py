"""`cudal1::log_bessel_i` and `cudal1::log_bessel_k`: logarithms of the modified Bessel functions of
any real order.

PyTorch has these functions for orders 0 and 1 only, and their values leave every floating-point
type early: I_0(90) is no float32, K_0(110) none either. The logarithms are of ordinary size. Both
functions are integrals of something positive with one peak, so nothing cancels:

    I_v(x) = (x/2)^v / (sqrt(pi) Gamma(v + 1/2)) * integral over all u of
             sech(u)^(2v+1) exp(x tanh u)                                  (DLMF 10.32.2)
    K_v(x) = 1/2 * integral over all t of exp(v t - x cosh t)              (DLMF 10.32.9)

The peak's place and height are known in closed form and taken out of the integral; the rest is
summed with equal steps, which for such functions is right to the last digits once a step resolves
the peak and the nearest pole. Where the peak is too narrow for float64 to follow, its own width is
the integral (Laplace's method): what that leaves out is below the round-off of the height.
Everything is computed in float64, in at most 11,000 steps for any two numbers below 1e300. The same
formulas as a Triton function are in `kernels/bessel.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

__all__ = [
    "LAST_EXPONENT",
    "MAX_GAUSSIAN_WIDTH",
    "MIN_RESOLVED_WIDTH",
    "SERIES",
    "STEP",
    "TARGETS",
    "operator_of",
]

TARGETS = frozenset({"cudal1.log_bessel_i.default", "cudal1.log_bessel_k.default"})
# exp(-2 pi (pi / 4) / step) is below float64's round-off: the poles next to the axis are at least
# pi / 4 away
STEP = 0.14
# The integrand left out beside the peak is below its height times exp(-40) = 4e-18: less than
# float64's round-off of 1.1e-16.
LAST_EXPONENT = 40.0
# Stirling's series of log Gamma, DLMF 5.11.1.
SERIES = (
    1 / 12,
    -1 / 360,
    1 / 1260,
    -1 / 1680,
    1 / 1188,
    -691 / 360360,
    1 / 156,
)
# A peak of this width is so near to a normal distribution that it has ended after 12 standard
# deviations.
MAX_GAUSSIAN_WIDTH = 2**-6
# Below this width differences near the peak are round-off.
MIN_RESOLVED_WIDTH = 2**-20
# The sum ends after 12 standard deviations if the exponent has fallen by 38 there.
_NEAR, _SURE = 12.0, 38.0
# Beyond it exp() leaves float64, whose largest exponent is 709.
_FAR = 600.0
# Stirling's series is for large arguments: it is taken at z + 8, and Gamma's recurrence leads back.
_SHIFT = 8


def operator_of(target: str) -> torch._ops.OpOverload:
    """The operator called `target`, one of `TARGETS`."""
    _define()
    operator: torch._ops.OpOverload = getattr(torch.ops.cudal1, target.split(".")[1]).default
    return operator


@cache
def _define() -> torch.library.Library:
    library = torch.library.Library("cudal1", "FRAGMENT")
    kinds: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[..., Tensor]]] = {
        "log_bessel_i": (_log_i, _slope_i),
        "log_bessel_k": (_log_k, _slope_k),
    }
    for name, (formula, slope) in kinds.items():
        library.define(
            f"{name}(Tensor order, Tensor x) -> Tensor",
            tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise),
        )
        for key in ("CPU", "CUDA"):
            library.impl(name, partial(_compute, formula), key)
        torch.library.register_fake(f"cudal1::{name}", _fake, lib=library)
        torch.library.register_autograd(
            f"cudal1::{name}", partial(_backward, slope), setup_context=_keep, lib=library
        )
    return library


def _fake(order: Tensor, x: Tensor) -> Tensor:
    return torch.add(order, x)


def _compute(formula: Callable[[Tensor, Tensor], Tensor], order: Tensor, x: Tensor) -> Tensor:
    result = _fake(order, x)
    if not result.is_floating_point():
        raise TypeError(
            f"expected an order or an x of a floating-point type, came {order.dtype} and {x.dtype}"
        )
    # In float64 whatever the dtypes: the peak's height is a difference of large numbers.
    v, at = torch.broadcast_tensors(order.double(), x.double())
    return result.copy_(formula(v, at))


def _log_i(order: Tensor, x: Tensor) -> Tensor:
    served = (x > 0) & (x < math.inf) & (order >= 0) & (order < math.inf)
    # Other places get 1.0 and their limits below: a NaN there would enter the count of steps, which
    # is one number for the whole tensor.
    v, at = torch.where(served, order, 1.0), torch.where(served, x, 1.0)
    a = 2 * v + 1
    # hypot, because a * a and x * x overflow long before their root does.
    root_sum = a / 2 + torch.hypot(a / 2, at)
    t = at / root_sum  # tanh of the peak's place
    # The quotient underflows for small x; the difference of logarithms does not.
    log_t = torch.where(t > 1e-300, torch.log(t), torch.log(at) - torch.log(root_sum))
    width = torch.rsqrt(a * (1 + t * t))

    def exponent(d: Tensor) -> Tensor:
        far = torch.sinh(d)
        # cosh d - 1 in a form that keeps its digits near the peak, where it is a difference of
        # equal numbers.
        above = 2 * torch.sinh(d / 2) ** 2 + t * far
        return a * (t * far / (1 + above) - torch.log1p(above))

    tail = LAST_EXPONENT / a + 1.2
    before, after = (
        torch.where(_has_ended(exponent(sign * _NEAR * width), width), _NEAR * width, tail)
        for sign in (-1, 1)
    )
    z = v + 0.5
    gamma = (
        (z + _SHIFT - 0.5) * torch.log1p(_SHIFT / z)
        - _log_product(z)
        - (z + _SHIFT)
        + 0.5 * math.log(2 * math.pi)
    )
    gamma = gamma + _series(z + _SHIFT)  # log Gamma(z) - (z - 1/2) log z
    peak = v * log_t + 0.5 * torch.log(a / root_sum) + at * t - gamma - 0.5 * math.log(math.pi)
    logarithm = peak + torch.log(_integrate(exponent, before, after, width))
    edge = torch.where(
        x == 0,
        torch.where(order == 0, 0.0, -math.inf),
        torch.where(x == math.inf, math.inf, -math.inf),
    )
    edge = torch.where((order == math.inf) & (x == math.inf), math.nan, edge)
    return torch.where(served, logarithm, torch.where((order >= 0) & (x >= 0), edge, math.nan))


def _log_k(order: Tensor, x: Tensor) -> Tensor:
    order = order.abs()
    served = (x > 0) & (x < math.inf) & (order < math.inf)
    v, at = torch.where(served, order, 1.0), torch.where(served, x, 1.0)
    r = torch.hypot(v, at)
    # r - v without cancellation. x * (x / (r + v)) and not x * x, which would overflow.
    gap, log_gap = at * (at / (r + v)), 2 * torch.log(at) - torch.log(r + v)  # of r - v
    width = torch.rsqrt(r)

    def exponent(d: Tensor) -> Tensor:
        rise = 2 * torch.sinh(d / 2) ** 2
        # Far to the left exp() overflows while the gap underflows: their product would be NaN.
        left_branch = torch.where(d < -_FAR, torch.exp(log_gap - d - math.log(2)), gap * rise)
        return torch.where(
            d > 0,
            # Clamped, because 0 * inf is NaN for order 0.
            -r * rise - v * torch.clamp_max(torch.sinh(d) - d, 1e300),
            v * (d - torch.expm1(d)) - left_branch,
        )

    def near(sign: int) -> Tensor:
        return torch.where(
            _has_ended(exponent(sign * _NEAR * width), width), _NEAR * width, math.inf
        )

    after = torch.minimum(near(1), _reach(r, torch.log(r)))
    reach = _reach(gap, log_gap)
    before = torch.minimum(near(-1), torch.minimum(LAST_EXPONENT / v + 1, reach))
    ratio = (v + r) / at
    logarithm = torch.where(ratio < math.inf, torch.log(ratio), torch.log(v + r) - torch.log(at))
    peak = v * logarithm - r - math.log(2)
    found = peak + torch.log(_integrate(exponent, before, after, width))
    edge = torch.where(x == math.inf, torch.where(order == math.inf, math.nan, -math.inf), math.inf)
    return torch.where(served, found, torch.where((x >= 0) & (order >= 0), edge, math.nan))


def _has_ended(exponent: Tensor, width: Tensor) -> Tensor:
    """Whether the integrand is negligible beyond the place, 12 widths from the peak, that has this
    exponent.
    """
    return (exponent <= -_SURE) | (width < MAX_GAUSSIAN_WIDTH)


def _integrate(
    exponent: Callable[[Tensor], Tensor], before: Tensor, after: Tensor, width: Tensor
) -> Tensor:
    """The integral of `exp(exponent)` from `-before` to `after`, by the trapezoidal rule."""
    step = torch.clamp_max(width / 2, STEP)
    # A peak too narrow for float64 asked for 1e19 steps.
    narrow = width < MIN_RESOLVED_WIDTH
    count = torch.ceil((before + after) / step)
    # NaN and infinity come from numbers beyond 1e300, for which `before` and `after` overflow.
    count = torch.where(narrow, 0.0, torch.nan_to_num(count, nan=0.0, posinf=0.0))
    total = torch.zeros_like(step)
    for number in range(int(count.max()) + 1 if count.numel() else 0):
        total += torch.where(count >= number, torch.exp(exponent(number * step - before)), 0.0)
    return torch.where(narrow, math.sqrt(2 * math.pi) * width, total * step)


def _log_product(z: Tensor) -> Tensor:
    """log of (1 + 1/z) (1 + 2/z) ... (1 + 7/z)."""
    product = torch.ones_like(z)
    for number in range(1, _SHIFT):
        product = product * (1 + number / z)
    return torch.log(product)


def _series(y: Tensor) -> Tensor:
    total, power = torch.zeros_like(y), 1 / y
    for coefficient in SERIES:
        total, power = total + coefficient * power, power / (y * y)
    return total


def _reach(factor: Tensor, log_factor: Tensor) -> Tensor:
    """The t at which `factor (cosh t - 1)` is LAST_EXPONENT. It comes from the logarithm alone
    where the factor is no normal number any more.
    """
    y = LAST_EXPONENT / factor
    far = math.log(2 * LAST_EXPONENT) - log_factor
    return torch.where(y < 1e300, torch.log1p(y + torch.sqrt(y) * torch.sqrt(y + 2)), far)


def _keep(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor
) -> None:
    order, x = inputs
    if order.requires_grad:
        raise NotImplementedError(
            "the order of a Bessel function has no gradient here; expected one that requires none"
        )
    ctx.save_for_backward(order, x, output)


def _backward(
    slope: Callable[[Tensor, Tensor, Tensor], Tensor],
    ctx: torch.autograd.function.FunctionCtx,
    gradient: Tensor,
) -> tuple[None, Tensor]:
    order, x, output = ctx.saved_tensors  # type: ignore[attr-defined]
    # Summed over the places at which x was broadcast.
    return None, (gradient * slope(order, x, output)).sum_to_size(x.shape)


def _slope_i(order: Tensor, x: Tensor, value: Tensor) -> Tensor:
    """I_v'/I_v = v/x + I_(v+1)/I_v (DLMF 10.29.2)."""
    # As a difference of logarithms: the functions themselves leave float64 early.
    return order / x + torch.exp(operator_of("cudal1.log_bessel_i.default")(order + 1, x) - value)


def _slope_k(order: Tensor, x: Tensor, value: Tensor) -> Tensor:
    """K_v'/K_v = -(K_(v-1) + K_(v+1)) / (2 K_v) (DLMF 10.29.1)."""
    log_k = operator_of("cudal1.log_bessel_k.default")
    return -(torch.exp(log_k(order - 1, x) - value) + torch.exp(log_k(order + 1, x) - value)) / 2
