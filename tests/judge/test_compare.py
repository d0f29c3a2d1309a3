"""The numerics criterion, against float64 results."""

from __future__ import annotations

import math

import pytest
import torch

from torch_cudal1.judge.compare import compare, same_bits, same_masks

N = 512


@pytest.fixture(scope="module")
def product() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b, their float32 product and the float64 one; float32 sums of 512 terms."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(N, N, generator=generator) for _ in range(2))
    return a, b, a @ b, a.double() @ b.double()


def _tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _bf16_high_low(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high = x.bfloat16().float()
    return high, (x - high).bfloat16().float()


def _bf16x3(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (ah, al), (bh, bl) = _bf16_high_low(a), _bf16_high_low(b)
    return ah @ bh + (ah @ bl + al @ bh)


def test_another_summation_order_is_right(product) -> None:
    a, b, eager, exact = product
    split = a[:, : N // 2] @ b[: N // 2] + a[:, N // 2 :] @ b[N // 2 :]
    assert compare(split, eager, exact, longest=N).passed


@pytest.mark.parametrize("cheat", ["tf32", "bf16", "bf16x3"])
def test_fewer_bits_inside_are_refused(product, cheat: str) -> None:
    a, b, eager, exact = product
    wrong = {
        "tf32": lambda: _tf32(a) @ _tf32(b),
        "bf16": lambda: a.bfloat16().float() @ b.bfloat16().float(),
        "bf16x3": lambda: _bf16x3(a, b),
    }[cheat]()
    found = compare(wrong, eager, exact, longest=N)
    assert not found.passed
    assert found.ratio is not None
    assert found.ratio > 2


@pytest.mark.parametrize("cheat", ["tf32", "bf16"])
def test_slack_admits_more_rounding_and_no_coarser_arithmetic(product, cheat: str) -> None:
    a, b, eager, exact = product
    noisier = (exact + 3 * (eager.double() - exact)).float()
    assert not compare(noisier, eager, exact, longest=N).passed
    assert compare(noisier, eager, exact, longest=N, slack=4.0).passed
    coarse = _tf32(a) @ _tf32(b) if cheat == "tf32" else a.bfloat16().float() @ b.bfloat16().float()
    assert not compare(coarse, eager, exact, longest=N, slack=4.0).passed


def test_one_wrong_element_of_many_is_refused(product) -> None:
    _, _, eager, exact = product
    wrong = eager.clone()
    wrong[17, 200] += 1e-3
    assert not compare(wrong, eager, exact, longest=N).passed


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_limit_scales_with_the_output(product, scale: float) -> None:
    _, _, eager, exact = product
    zeros = torch.zeros_like(eager)
    assert not compare(zeros, eager * scale, exact * scale, longest=N).passed
    assert not compare(eager * scale * (1 + 1e-4), eager * scale, exact * scale, longest=N).passed


def test_a_lucky_eager_scalar_leaves_room_for_one_rounding() -> None:
    exact = torch.tensor(1.2345678, dtype=torch.float64)
    eager = exact.float()
    assert compare(torch.nextafter(eager, torch.tensor(2.0)), eager, exact, longest=1000).passed
    assert not compare(eager * (1 + 1e-5), eager, exact, longest=1000).passed


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("candidate", "eager", "exact", "passed"),
    [
        ([NAN, 1.0], [NAN, 1.0], [NAN, 1.0], True),
        ([0.0, 1.0], [NAN, 1.0], [NAN, 1.0], False),  # NaN swallowed
        ([NAN, 1.0], [0.5, 1.0], [0.5, 1.0], False),
        ([-INF, 1.0], [INF, 1.0], [INF, 1.0], False),  # sign of infinity
        ([0.5, 1.0], [INF, 1.0], [0.5, 1.0], True),  # eager overflowed inside, float64 did not
        ([INF, 1.0], [INF, 1.0], [0.5, 1.0], True),
        ([3e38, 1.0], [INF, 1.0], [1e39, 1.0], False),  # beyond the type: infinity
    ],
)
def test_nan_and_infinity_follow_eager(candidate: list[float], eager: list[float], exact: list[float], passed: bool) -> None:
    c, e, x = torch.tensor(candidate), torch.tensor(eager), torch.tensor(exact, dtype=torch.float64)
    assert compare(c, e, x).passed is passed
    assert same_masks(c, [e], x).passed is passed


def test_integers_and_booleans_are_exact() -> None:
    whole = torch.arange(100)
    assert compare(whole.clone(), whole, whole).passed
    assert not compare(whole + (whole == 7), whole, whole).passed
    assert not compare(whole > 50, whole > 51, whole > 51).passed


def test_another_dtype_or_shape_is_refused() -> None:
    x = torch.ones(4)
    assert not compare(x.half(), x, x.double()).passed
    assert not compare(x[:3], x, x.double()).passed


def test_without_float64_the_formats_limits_hold(product) -> None:
    a, b, eager, _ = product
    split = a[:, : N // 2] @ b[: N // 2] + a[:, N // 2 :] @ b[N // 2 :]
    assert compare(split, eager, None, longest=N).passed
    assert not compare(_tf32(a) @ _tf32(b), eager, None, longest=N).passed


def test_kernelbench_is_as_lax_as_the_benchmark_and_no_laxer(product) -> None:
    _, _, eager, exact = product
    assert compare(eager * (1 + 5e-5), eager, exact, precision="kernelbench").passed
    assert not compare(eager * (1 + 5e-3), eager, exact, precision="kernelbench").passed


def test_a_distribution_without_digits_is_no_evidence() -> None:
    exact = torch.full((5000,), 1e-9, dtype=torch.float64)
    eager = torch.zeros(5000)
    found = compare(torch.ones(5000) * 1e-9, eager, exact)
    assert found.void


def test_bits_are_compared_nan_included() -> None:
    x = torch.tensor([NAN, -0.0, 1.0])
    assert same_bits(x, x.clone())
    assert not same_bits(x, torch.tensor([NAN, 0.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_bits_are_compared_whatever_the_strides(dtype: torch.dtype) -> None:
    one = torch.ones(8, 8, dtype=dtype)
    assert same_bits(one[:1, 0], torch.ones(1, dtype=dtype))  # one element, stride 8
    assert same_bits(one[0, 0], torch.ones((), dtype=dtype))
    assert same_bits(one[:0, 0], torch.empty(0, dtype=dtype))
    assert same_bits(one[2:, ::3].t(), torch.ones(3, 6, dtype=dtype))
    assert not same_bits(one[3:4, 5], torch.zeros(1, dtype=dtype))
