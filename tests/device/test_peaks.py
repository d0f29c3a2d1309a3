"""Nothing is faster than light; and a bound that honest work meets is no bound."""

from __future__ import annotations

import pytest
import torch

from tests.judge.programs import V, linear_relu, op, spec
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.peaks import (
    DevicePeaks,
    RequiredWork,
    check_roofline,
    count_required_work,
    find_device_peaks,
)
from torch_cudal1.ir.program import Program

H200 = DevicePeaks({1: 2e15, 2: 1e15, 4: 5e14, 8: 1.25e14}, 4.8e12, 60e6)


@pytest.mark.parametrize(
    ("least", "time_us", "passed"),
    [
        (RequiredWork(1e12, 2, 0), 1_200.0, True),
        (RequiredWork(1e12, 2, 0), 1_000.0, False),  # at the peak itself
        (RequiredWork(1e12, 4, 0), 1_200.0, False),  # TF32 has half the rate
        (RequiredWork(0.0, 4, 540_000_000), 120.0, True),
        (RequiredWork(0.0, 4, 540_000_000), 90.0, False),  # 480 MB beyond the cache take 100 us
        (RequiredWork(0.0, 4, 50_000_000), 1.0, True),  # all of it may stay in the cache
        (RequiredWork(0.0, 4, 0), 0.1, True),
    ],
)
def test_faster_than_the_device_allows_is_refused(
    least: RequiredWork, time_us: float, passed: bool
) -> None:
    check = check_roofline(least, H200, time_us)
    assert (check.name, check.passed) == ("roofline", passed)
    assert check.value is not None
    assert (check.value <= 0.95) == passed


def test_an_unknown_device_is_not_tested_and_says_so() -> None:
    check = check_roofline(
        RequiredWork(1e30, 4, 1 << 50), Refusal("no peak rates known for X"), 1e-9
    )
    assert check.passed
    assert "not tested" in check.detail


def test_only_what_a_program_must_do_itself_counts() -> None:
    size = 64
    product = Program(
        (spec(size, size), spec(size, size)), (op("aten.mm.default", V(0), V(1), out=2),), (2,)
    )
    assert count_required_work(product) == RequiredWork(2.0 * size**3, 4, size * size * 4)


def test_a_convolution_may_save_what_winograd_saves() -> None:
    args = (V(0), V(1), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    step = op("aten.convolution.default", *args, out=2)
    convolution = Program((spec(1, 8, 16, 16), spec(8, 8, 3, 3)), (step,), (2,))
    assert count_required_work(convolution).flops == 2.0 * 8 * 8 * 9 * 16 * 16 / 4


def test_an_honest_product_stays_below_the_ceiling_of_this_processor() -> None:
    least = count_required_work(linear_relu().program)
    peaks = find_device_peaks(torch.device("cpu"))
    assert isinstance(peaks, DevicePeaks)
    assert check_roofline(least, peaks, 50.0).passed
    assert not check_roofline(RequiredWork(1e12, 4, 0), peaks, 1.0).passed
