"""Logarithms of Bessel functions for users: a plain number as order, PyTorch's type promotion, limits
at the edges, and modules that call them.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import cudal1
from torch_cudal1.api.special import log_bessel_i, log_bessel_k
from torch_cudal1.graph.captured import capture_regions

INF, NAN, F64 = math.inf, math.nan, torch.float64


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


def test_types_are_those_of_a_sum_and_integers_alone_are_refused() -> None:
    half, integers = torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.int64)
    assert log_bessel_k(integers, half).dtype == torch.bfloat16
    assert log_bessel_i(1.5, half).dtype == torch.bfloat16
    assert log_bessel_i(integers, torch.ones(3)).dtype == torch.float32
    with pytest.raises(TypeError, match="expected an order or an x of a floating-point type"):
        log_bessel_i(integers, integers)


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
