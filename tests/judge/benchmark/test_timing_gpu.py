"""The clock on a GPU: hidden streams are seen, the L2 cache is really flushed, a kernel is as fast
as itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.judge.programs import V, candidate, op
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.peaks import (
    DevicePeaks,
    check_roofline,
    count_required_work,
    find_device_peaks,
)
from torch_cudal1.ir.program import Program, TensorSpec
from torch_cudal1.ir.records import Candidate, Contract, Region
from torch_cudal1.judge import BaselineRanking, EvaluationConfig, evaluate_candidate
from torch_cudal1.judge.benchmark.protocol import LocalSampler, measure
from torch_cudal1.judge.benchmark.timing import list_l2_states, measure_device_time_us, measure_side
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
CUDA = torch.device("cuda", 0)
FAST = TIMING_PLANS["fast"]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def square(size: int) -> torch.Tensor:
    return torch.randn(size, size, device=CUDA)


@pytest.mark.parametrize("size", [64, 1024, 4096])
def test_an_honest_call_leaves_nothing_on_other_streams(size: int) -> None:
    x = square(size)
    ratio = measure_side(lambda: x @ x, CUDA).sync_ratio
    assert ratio is not None
    assert ratio < 1.2


def test_joined_side_streams_are_honest_and_unjoined_ones_are_not() -> None:
    x, side = square(4096), torch.cuda.Stream()

    def run(*, join: bool) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = x @ x
        if join:
            torch.cuda.current_stream().wait_stream(side)
        return out

    honest, hidden = (
        measure_side(lambda: run(join=True), CUDA).sync_ratio,
        measure_side(lambda: run(join=False), CUDA).sync_ratio,
    )
    assert honest is not None
    assert hidden is not None
    assert honest < 1.2
    assert hidden > 1.5


def test_work_on_a_hidden_stream_is_in_the_time_all_the_same() -> None:
    x, side = square(4096), torch.cuda.Stream()

    def hidden() -> torch.Tensor:
        with torch.cuda.stream(side):
            return x @ x

    measurement = measure(LocalSampler(lambda: x @ x, hidden, CUDA, ("cold", "hot")), FAST)
    assert measurement.summary.speedup < 1.1


def test_host_time_and_device_time_are_measured_apart() -> None:
    x = square(4096)
    long = measure_side(lambda: x @ x, CUDA)
    assert long.device_us is not None
    assert long.host_us < long.device_us / 4
    small = torch.randn(16, device=CUDA)
    short = measure_side(lambda: (small + 1, time.sleep(1e-3)), CUDA)
    assert short.host_us > 1_000


def test_a_flush_makes_what_fits_the_cache_slower() -> None:
    """16 MB read and 16 MB written: hot they stay in the L2 cache."""
    x = square(2048)
    torch.cuda.synchronize()
    hot_us = min(_hot_us(x) for _ in range(5))
    assert measure_device_time_us(lambda: x + 1, CUDA) > 1.2 * hot_us


def _hot_us(x: torch.Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(100):
        x + 1
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / 100


@pytest.mark.parametrize("size", [2048, 4096])
def test_a_kernel_is_as_fast_as_itself(size: int) -> None:
    x, y = square(size), square(size)
    assert list_l2_states(CUDA, FAST) == ("cold", "hot")
    measurement = measure(
        LocalSampler(lambda: x.softmax(-1), lambda: y.softmax(-1), CUDA, ("cold", "hot")), FAST
    )
    assert measurement.steady
    assert all(abs(math.log(each.speedup)) < 0.02 for each in measurement.summaries.values())
    assert measurement.summary.low < 1.05


def test_this_gpus_ceiling_is_known_and_a_product_stays_below_it() -> None:
    peaks = find_device_peaks(CUDA)
    if isinstance(peaks, str):
        pytest.skip(peaks)
    assert isinstance(peaks, DevicePeaks)
    assert peaks.bytes_per_s > 5e11
    spec = replace(TensorSpec.of(torch.empty(4096, 4096, dtype=torch.bfloat16)), device="cuda")
    product = Program((spec, spec), (op("aten.mm.default", V(0), V(1), out=2),), (2,))
    x = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16)
    check = check_roofline(
        count_required_work(product), peaks, measure_device_time_us(lambda: x @ x, CUDA)
    )
    assert check.passed, check
    assert (check.value or 0) > 0.2  # a bound that is of some use


def test_a_typical_candidate_is_evaluated_with_all_its_numbers_in_time() -> None:
    spec = replace(TensorSpec.of(torch.empty(1024, 1024)), device="cuda")
    region = Region(
        Program((spec,), (op("aten._softmax.default", V(0), -1, False, out=1),), (1,)), ("input",)
    )
    ranking = BaselineRanking(Candidate(region.program, "eager", "baseline"), {"eager": 1.0})
    judgement = evaluate_candidate(
        region, candidate(region.program), ranking, EvaluationConfig(Settings(), Contract(), CUDA)
    )
    names = {check.name for check in judgement.verdict.checks}
    assert {"timed_output", "wall_slope", "sync_ratio", "roofline", "unstable"} <= names
    assert judgement.verdict.passed, judgement.verdict.failure
    assert judgement.timing is not None
    details = judgement.timing.details
    assert set(details["l2"]) == {"cold", "hot"}
    assert details["sides"]["candidate"]["device_us"] > 0
    assert details["seconds"] < 3.0
