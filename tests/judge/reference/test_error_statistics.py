"""Block by block, the statistics are those of the whole."""

from __future__ import annotations

import math

import pytest
import torch

from torch_cudal1.judge.reference import error_statistics
from torch_cudal1.judge.reference.error_statistics import (
    all_finite,
    count_beyond,
    iter_flat_blocks,
    measure_errors,
)

FLOOR = 2.0**-24
SHAPES = {
    "rows": (33, 130),
    "short rows": (700, 3),
    "flat": (4_099,),
    "one row": (1, 999),
    "three dimensions": (5, 7, 64),
}


def make_results(shape: tuple[int, ...], seed: int = 0) -> error_statistics.Results:
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    noise = [
        torch.randn(shape, generator=generator, dtype=torch.float64) * size for size in (2e-7, 1e-7)
    ]
    return (exact + noise[0]).float(), (exact + noise[1]).float(), exact


def compute_plainly(tensors: error_statistics.Results) -> tuple[float, ...]:
    candidate, baseline, exact = (tensor.double() for tensor in tensors)
    finite = candidate.isfinite() & baseline.isfinite() & exact.isfinite()
    rows = exact.dim() > 1 and exact.shape[-1] >= 8
    magnitude = exact.abs().nan_to_num(posinf=0.0)
    scale = magnitude.amax(-1, keepdim=True) if rows else magnitude.max()
    scale = scale.clamp_min(max(FLOOR * float(scale.max()), 1e-300)).expand_as(exact)
    baseline_error, error = (baseline - exact).abs(), (candidate - exact).abs()
    means = [float(t[finite].square().mean().sqrt()) for t in (exact, baseline_error, error)]
    return (*means, *(float((t / scale)[finite].max()) for t in (baseline_error, error)))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(error_statistics._BLOCK_ELEMENTS, "cpu", 256)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("odd", [False, True], ids=["finite", "with NaN and infinities"])
def test_statistics_of_blocks_are_those_of_the_whole(name: str, odd: bool) -> None:
    tensors = make_results(SHAPES[name])
    if odd:
        for number, (tensor, value) in enumerate(
            zip(tensors, (math.nan, math.inf, -math.inf), strict=True)
        ):
            tensor.view(-1)[number * 7 :: 31] = value
    statistics = measure_errors(tensors, FLOOR)
    assert statistics is not None
    assert (
        statistics.scale,
        statistics.baseline_error,
        statistics.error,
        statistics.worst_baseline_error,
        statistics.worst,
    ) == pytest.approx(compute_plainly(tensors), rel=1e-9)
    assert statistics.count == (
        tensors[2].numel()
        if not odd
        else int(torch.stack([t.isfinite() for t in tensors]).all(0).sum())
    )


def test_few_large_errors_rest_on_few_elements() -> None:
    candidate, baseline, exact = make_results((64, 64))
    ordinary = measure_errors((candidate, baseline, exact), FLOOR)
    baseline[3, 5] += 1.0
    lonely = measure_errors((candidate, baseline, exact), FLOOR)
    assert ordinary is not None
    assert lonely is not None
    assert ordinary.effective > 3_000
    assert lonely.effective < 10


def test_elements_far_off_are_counted_in_every_block() -> None:
    candidate, baseline, exact = make_results((40, 64))
    candidate[::8, 3] += 1.0
    assert count_beyond((candidate, baseline, exact), FLOOR, 1e-3) == 5


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_float64_results_outside_of_float32_still_have_a_spread(size: float) -> None:
    exact = torch.full((16, 16), size, dtype=torch.float64)
    statistics = measure_errors((torch.zeros(16, 16), torch.zeros(16, 16), exact), FLOOR)
    assert statistics is not None
    assert statistics.baseline_error == pytest.approx(size)
    assert statistics.baseline_error == pytest.approx(statistics.scale)


def test_errors_too_small_for_a_square_are_no_division_by_zero() -> None:
    exact = torch.randn(16, 16, dtype=torch.float64)
    near = exact.clone()
    near[3, 3] = 0.0
    exact[3, 3] = 1e-100
    statistics = measure_errors((near, near, exact), FLOOR)
    assert statistics is not None
    assert statistics.baseline_error == pytest.approx(1e-100 / 16)
    assert statistics.effective == 256


def test_without_a_finite_element_there_are_no_statistics() -> None:
    no_numbers = torch.full((4, 9), math.nan)
    assert measure_errors((no_numbers, no_numbers, no_numbers.double()), FLOOR) is None


def test_a_sum_that_overflows_is_not_taken_for_an_infinity() -> None:
    assert all_finite(torch.full((64,), 3e38))
    assert not all_finite(torch.tensor([1.0, math.inf]))
    assert not all_finite(torch.tensor([math.nan]))


def test_flat_blocks_go_side_by_side() -> None:
    rows, flat = torch.arange(600.0).reshape(20, 30), torch.arange(600.0)
    assert all(torch.equal(a, b) for a, b in iter_flat_blocks(rows, flat))
    assert sum(block.numel() for block, _ in iter_flat_blocks(rows, flat)) == 600
