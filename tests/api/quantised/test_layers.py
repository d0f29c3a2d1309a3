"""Linear layers of fewer bits compute what their weights say, and are linear layers for others."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_cudal1.api.quantised.layers import (
    Fp8Linear,
    Int4Linear,
    Int8Linear,
    QuantisedLinear,
    choose_group,
)

KINDS: dict[type[QuantisedLinear], float] = {Int8Linear: 0.02, Int4Linear: 0.2, Fp8Linear: 0.06}


@pytest.fixture
def linear() -> nn.Linear:
    layer = nn.Linear(256, 48)
    with torch.no_grad():
        layer.weight[3] = 0.0  # a row of zeros has no largest magnitude
        layer.weight[4] *= 1000.0
    return layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_as_close_as_its_bits_allow(kind, dtype, linear):
    linear = linear.to(dtype)
    x = torch.randn(4, 50, 256, dtype=dtype)
    layer = kind(linear)
    result, expected = layer(x), linear(x)
    assert (result.shape, result.dtype) == (expected.shape, dtype)
    # each row has a scale of its own
    for row in range(linear.out_features):
        difference = (result[..., row] - expected[..., row]).double().norm()
        assert difference <= KINDS[kind] * expected[..., row].double().norm() + 1e-2


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_a_weight_only_layer_multiplies_with_the_weight_that_it_shows(kind, linear):
    x = torch.randn(7, 256)
    layer = kind(linear)
    assert torch.equal(layer(x), F.linear(x, layer.weight, linear.bias))
    assert torch.equal(layer.weight[3], torch.zeros(256))


def test_weights_of_int8_and_int4_are_off_by_half_a_step_at_most(linear):
    for kind, largest, group in ((Int8Linear, 127, 256), (Int4Linear, 7, 128)):
        weight = linear.weight.detach().view(48, -1, group)
        step = weight.abs().amax(-1, keepdim=True) / largest
        assert torch.all(
            (kind(linear).weight.view(48, -1, group) - weight).abs() <= 0.5001 * step + 1e-9
        )


@pytest.mark.parametrize("kind", KINDS)
def test_others_see_a_linear_layer_of_the_old_dtype(kind, linear):
    layer = kind(linear.bfloat16())
    assert isinstance(layer, nn.Linear)
    assert (layer.weight.shape, layer.weight.dtype) == ((48, 256), torch.bfloat16)
    assert layer.bias is linear.bias
    assert layer.digits.dtype in (torch.int8, torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_saved_and_loaded_and_cast(kind, linear):
    layer, x = kind(linear), torch.randn(3, 256)
    stored = io.BytesIO()
    torch.save(layer.state_dict(), stored)
    stored.seek(0)
    other = kind(nn.Linear(256, 48))
    other.load_state_dict(torch.load(stored, weights_only=True))
    assert torch.equal(other(x), layer(x))
    cast = layer.to(torch.bfloat16)
    assert cast.digits.dtype in (torch.int8, torch.uint8)
    assert cast(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "layer", "reason"),
    [
        (Int8Linear, nn.Linear(8, 8).double(), "torch.float64"),
        (Int4Linear, nn.Linear(48, 8), "no multiple of 32"),
        (Fp8Linear, nn.Linear(24, 16), "16 x 24"),
        (Fp8Linear, nn.Linear(16, 24), "24 x 16"),
    ],
)
def test_what_cannot_be_of_a_kind_says_why(kind, layer, reason):
    assert reason in kind.find_obstacle(layer)


def test_weights_that_are_not_finite_have_no_scale(linear):
    with torch.no_grad():
        linear.weight[0, 0] = float("inf")
    assert all("not finite" in kind.find_obstacle(linear) for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_of_fp16_that_is_next_to_nothing_stays_finite(kind):
    linear = nn.Linear(256, 48)
    with torch.no_grad():
        linear.weight.fill_(1e-7)
    layer = kind(linear.half())
    assert layer.weight.isfinite().all()
    assert layer.weight.abs().max() <= 2e-7


def test_groups_divide_a_row():
    assert [choose_group(n) for n in (256, 192, 96, 48)] == [128, 64, 32, 0]
