"""Logarithms of Bessel functions: right to the last digits where numbers of any size come, against
arbitrary precision.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath.libmp import NoConvergence

from torch_cudal1.ir.ops import bessel

ORDERS = (0.0, 1e-3, 0.5, 1.0, 2.7, 33.3, 1e3, 1e5)
PLACES = (1e-30, 1e-3, 0.1, 0.9, 2.5, 10.0, 50.0, 1e3, 1e8)
OPERATORS = {kind: bessel.operator_of(f"cudal1.log_bessel_{kind}.default") for kind in "ik"}
EXACT = {"i": mpmath.besseli, "k": mpmath.besselk}
F64 = torch.float64


@pytest.mark.parametrize("kind", OPERATORS)
def test_they_are_right_where_the_functions_themselves_are_no_numbers(kind: str) -> None:
    logarithms = OPERATORS[kind](
        torch.tensor(ORDERS, dtype=F64)[:, None], torch.tensor(PLACES, dtype=F64)
    )
    compared = 0
    with mpmath.workdps(40):
        for (row, order), (column, x) in itertools.product(enumerate(ORDERS), enumerate(PLACES)):
            try:
                exact = mpmath.log(EXACT[kind](mpmath.mpf(order), mpmath.mpf(x)))
            except (ValueError, NoConvergence):
                # mpmath's series give up where orders and places are both large.
                continue
            error = abs(mpmath.mpf(float(logarithms[row, column])) - exact) / max(1, abs(exact))
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


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("order", [3e6, 1e8, 1e11, 1e13, 1e20, 1e38, 1e300])
@pytest.mark.parametrize("ratio", [1e-30, 0.01, 0.7, 3.0, 1e5])
def test_huge_orders_have_peaks_too_narrow_for_float64_and_still_end(
    kind: str, order: float, ratio: float
) -> None:
    x = order * ratio
    logarithm = float(OPERATORS[kind](torch.tensor(order, dtype=F64), torch.tensor(x, dtype=F64)))
    with mpmath.workdps(400):
        exact = debye(kind, order, x)
        assert abs(logarithm - exact) <= 2e-14 * (abs(exact) + order + x)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(OPERATORS)),
    st.floats(min_value=0, max_value=1e300),
    st.floats(min_value=0, max_value=1e300),
)
def test_any_two_numbers_come_to_an_end_and_to_a_number(kind: str, order: float, x: float) -> None:
    order_tensor, x_tensor = torch.tensor([order], dtype=F64), torch.tensor([x], dtype=F64)
    assert not math.isnan(float(OPERATORS[kind](order_tensor, x_tensor))), (kind, order, x)


@pytest.mark.parametrize("kind", OPERATORS)
def test_numbers_of_every_size_come_to_a_number_in_few_steps(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_taken, integrate = [0], bessel._integrate

    def count_steps(
        exponent: Callable[[torch.Tensor], torch.Tensor], *rest: torch.Tensor
    ) -> torch.Tensor:
        def evaluate(place: torch.Tensor) -> torch.Tensor:
            steps_taken[0] += 1
            return exponent(place)

        return integrate(evaluate, *rest)

    monkeypatch.setattr(bessel, "_integrate", count_steps)
    sizes = torch.pow(10.0, torch.linspace(-323, 300, 46, dtype=F64))
    orders = torch.cat([torch.zeros(1, dtype=F64), sizes])
    logarithms = OPERATORS[kind](orders[:, None], sizes)
    assert 0 < steps_taken[0] <= 11_000
    assert not logarithms.isnan().any()
    steps = logarithms.diff(dim=1) / (1 + logarithms.abs()[:, 1:])
    assert (steps if kind == "i" else -steps).min() > -1e-13  # both are monotonic in x


@pytest.mark.parametrize("kind", OPERATORS)
def test_numbers_at_the_end_of_float64_come_to_an_end(kind: str) -> None:
    ends = torch.tensor([5e-324, 1e-310, 1e305, 1.7e308], dtype=F64)
    assert OPERATORS[kind](ends[:, None], ends).shape == (4, 4)


@pytest.mark.parametrize("kind", OPERATORS)
def test_gradients_in_x(kind: str) -> None:
    logarithm = OPERATORS[kind]
    x = torch.tensor([0.3, 2.0, 40.0], dtype=F64, requires_grad=True)
    orders = torch.tensor([[0.0], [2.5]], dtype=F64)
    assert torch.autograd.gradcheck(lambda x: logarithm(orders, x), x)
    assert torch.autograd.gradgradcheck(lambda x: logarithm(orders[1], x), x)
    with pytest.raises(NotImplementedError, match="order of a Bessel function has no gradient"):
        logarithm(orders.clone().requires_grad_(), x)
