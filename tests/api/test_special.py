"""Logarithms of Bessel functions: right to the last digits where numbers of any size come, against
arbitrary precision.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath.libmp import NoConvergence
from torch import nn

import cudal1
from torch_cudal1.api.special import log_bessel_i, log_bessel_k
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.ops import bessel

ORDERS = (0.0, 1e-3, 0.5, 1.0, 2.7, 33.3, 1e3, 1e5)
PLACES = (1e-30, 1e-3, 0.1, 0.9, 2.5, 10.0, 50.0, 1e3, 1e8)
EXACT = {"i": (log_bessel_i, mpmath.besseli), "k": (log_bessel_k, mpmath.besselk)}
INF, NAN, F64 = math.inf, math.nan, torch.float64


@pytest.mark.parametrize("kind", EXACT)
def test_they_are_right_where_the_functions_themselves_are_no_numbers(kind: str) -> None:
    ours, theirs = EXACT[kind]
    found = ours(torch.tensor(ORDERS, dtype=F64)[:, None], torch.tensor(PLACES, dtype=F64))
    compared = 0
    with mpmath.workdps(40):
        for (row, order), (column, x) in itertools.product(enumerate(ORDERS), enumerate(PLACES)):
            try:
                exact = mpmath.log(theirs(mpmath.mpf(order), mpmath.mpf(x)))
            except (
                ValueError,
                NoConvergence,
            ):  # its series give up where orders and places are both large
                continue
            error = abs(mpmath.mpf(float(found[row, column])) - exact) / max(1, abs(exact))
            assert error < 2e-14, (order, x)
            compared += 1
    assert compared >= 60


def debye(kind: str, order: float, x: float) -> mpmath.mpf:
    """The uniform expansion for large orders with two terms, DLMF 10.41.3 and 10.41.4: off by about
    1/order^2.
    """
    v = mpmath.mpf(order)
    z = mpmath.mpf(x) / v
    root = mpmath.sqrt(1 + z * z)
    p, sign = 1 / root, 1 if kind == "i" else -1
    eta = root + mpmath.log(z / (1 + root))
    front = 2 * mpmath.pi * v if kind == "i" else 2 * v / mpmath.pi
    return (
        sign * v * eta
        - mpmath.log(front * root) / 2
        + mpmath.log(1 + sign * (3 * p - 5 * p**3) / 24 / v)
    )


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("order", [3e6, 1e8, 1e11, 1e13, 1e20, 1e38, 1e300])
@pytest.mark.parametrize("ratio", [1e-30, 0.01, 0.7, 3.0, 1e5])
def test_huge_orders_have_peaks_too_narrow_for_float64_and_still_end(
    kind: str, order: float, ratio: float
) -> None:
    x = order * ratio
    found = float(EXACT[kind][0](torch.tensor(order, dtype=F64), torch.tensor(x, dtype=F64)))
    with mpmath.workdps(400):
        exact = debye(kind, order, x)
        assert abs(found - exact) <= 2e-14 * (abs(exact) + order + x)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(EXACT)),
    st.floats(min_value=0, max_value=1e300),
    st.floats(min_value=0, max_value=1e300),
)
def test_any_two_numbers_come_to_an_end_and_to_a_number(kind: str, order: float, x: float) -> None:
    found = float(EXACT[kind][0](torch.tensor([order], dtype=F64), torch.tensor([x], dtype=F64)))
    assert not math.isnan(found), (kind, order, x)


@pytest.mark.parametrize("kind", EXACT)
def test_numbers_of_every_size_come_to_a_number_in_few_steps(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, summed = [0], bessel._integrate

    def counting(
        exponent: Callable[[torch.Tensor], torch.Tensor], *rest: torch.Tensor
    ) -> torch.Tensor:
        def counted(place: torch.Tensor) -> torch.Tensor:
            taken[0] += 1
            return exponent(place)

        return summed(counted, *rest)

    monkeypatch.setattr(bessel, "_integrate", counting)
    sizes = torch.pow(10.0, torch.linspace(-323, 300, 46, dtype=F64))
    orders = torch.cat([torch.zeros(1, dtype=F64), sizes])
    found = EXACT[kind][0](orders[:, None], sizes)
    assert 0 < taken[0] <= 11_000
    assert not found.isnan().any()
    steps = found.diff(dim=1) / (1 + found.abs()[:, 1:])
    assert (steps if kind == "i" else -steps).min() > -1e-13  # both are monotonic in x


@pytest.mark.parametrize("kind", EXACT)
def test_numbers_at_the_end_of_float64_come_to_an_end(kind: str) -> None:
    ends = torch.tensor([5e-324, 1e-310, 1e305, 1.7e308], dtype=F64)
    assert EXACT[kind][0](ends[:, None], ends).shape == (4, 4)


def test_torch_s_own_of_order_zero_are_met() -> None:
    x = torch.linspace(0.01, 80, 500, dtype=F64)
    torch.testing.assert_close(
        log_bessel_i(0.0, x), torch.log(torch.special.i0e(x)) + x, rtol=1e-13, atol=1e-13
    )
    torch.testing.assert_close(
        log_bessel_k(0.0, x),
        torch.log(torch.special.scaled_modified_bessel_k0(x)) - x,
        rtol=1e-13,
        atol=1e-13,
    )


def test_edges_are_limits_and_what_is_outside_is_not_a_number() -> None:
    x = torch.tensor([0.0, INF, -1.0, NAN])
    expected_i = {
        0.0: [0.0, INF, NAN, NAN],
        2.0: [-INF, INF, NAN, NAN],
        -1.0: [NAN] * 4,
        INF: [-INF, NAN, NAN, NAN],
    }
    expected_k = {
        0.0: [INF, -INF, NAN, NAN],
        -2.0: [INF, -INF, NAN, NAN],
        INF: [INF, NAN, NAN, NAN],
        NAN: [NAN] * 4,
    }
    for order, expected in expected_i.items():
        torch.testing.assert_close(log_bessel_i(order, x), torch.tensor(expected), equal_nan=True)
    for order, expected in expected_k.items():
        torch.testing.assert_close(log_bessel_k(order, x), torch.tensor(expected), equal_nan=True)
    assert log_bessel_i(1.0, torch.ones(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("kind", EXACT)
def test_gradients_in_x(kind: str) -> None:
    ours, _ = EXACT[kind]
    x = torch.tensor([0.3, 2.0, 40.0], dtype=F64, requires_grad=True)
    orders = torch.tensor([[0.0], [2.5]], dtype=F64)
    assert torch.autograd.gradcheck(lambda x: ours(orders, x), x)
    assert torch.autograd.gradgradcheck(lambda x: ours(2.5, x), x)
    with pytest.raises(NotImplementedError, match="order of a Bessel function has no gradient"):
        ours(orders.clone().requires_grad_(), x)


def test_types_are_those_of_a_sum_and_integers_alone_are_refused() -> None:
    half, whole = torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.int64)
    assert log_bessel_k(whole, half).dtype == torch.bfloat16
    assert log_bessel_i(1.5, half).dtype == torch.bfloat16
    assert log_bessel_i(whole, torch.ones(3)).dtype == torch.float32
    with pytest.raises(TypeError, match="expected an order or an x of a floating-point type"):
        log_bessel_i(whole, whole)


class Concentration(nn.Module):
    """The normaliser of a von Mises-Fisher distribution in many dimensions, where I_v(kappa) is no
    float32.
    """

    def forward(self, kappa: torch.Tensor) -> torch.Tensor:
        return 255.0 * torch.log(kappa) - log_bessel_i(255.0, kappa)


def test_a_module_with_one_is_captured_compiled_and_accelerated(tmp_path: Path) -> None:
    module, kappa = Concentration(), torch.rand(64) * 900 + 1
    with torch.no_grad():
        expected = module(kappa)
        assert torch.isfinite(expected).all()
        (region,) = capture_regions(module, (kappa,))
        assert "cudal1.log_bessel_i.default" in [step.target for step in region.program.steps]  # type: ignore[union-attr]
        torch.testing.assert_close(torch.compile(module, fullgraph=True)(kappa), expected)
        served = cudal1.accelerate(
            module, (kappa,), cache_dir=tmp_path, on_miss="tune", budget_s=1.0, strictness="error"
        )
        torch.testing.assert_close(served(kappa), expected)
    kappa.requires_grad_()
    (gradient,) = torch.autograd.grad(module(kappa).sum(), kappa)
    (compiled,) = torch.autograd.grad(torch.compile(module)(kappa).sum(), kappa)
    torch.testing.assert_close(compiled, gradient)


def test_they_are_public() -> None:
    assert cudal1.log_bessel_i is log_bessel_i
    assert cudal1.log_bessel_k is log_bessel_k
