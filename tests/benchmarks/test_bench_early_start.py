"""The benchmark of early starts: chains of kernels that all wait first, the same results on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import bench_early_start
from benchmarks.bench_early_start import CASES, build_chain, count_launches, measure_case
from benchmarks.bench_families import capture_case
from tests.fake_gpu import on_the_gpu
from torch_cudal1.device.cuda.cubin import inspect_cubin
from torch_cudal1.device.cuda.early_start import waits_first


def test_a_chain_is_made_of_kernels_that_wait_first() -> None:
    (case,) = (case for case in CASES if case.name == "blocks 768, 128 rows")
    with torch.inference_mode():
        captured = capture_case(case, torch.device("cpu"))
    groups = [
        replace(group, region=replace(group.region, program=on_the_gpu(group.region.program)))
        for group in captured.parts.groups
    ]
    captured = replace(
        captured,
        program=on_the_gpu(captured.program),
        parts=replace(captured.parts, groups=tuple(groups)),
    )
    program = build_chain(captured, 90)
    # Of each of six layers: two norms and three products.
    assert count_launches(program) >= 30
    cubins = [
        inspect_cubin(bytes(payload.numpy()))
        for payload in program.all_payloads().values()
        if payload.dtype == torch.uint8
    ]
    assert all(waits_first(code) for cubin in cubins for _, code in cubin.code)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_early_start.main([]) == 2
    assert "sm_90" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_graphs_of_early_starts_compute_the_same_bits(case) -> None:
    with torch.inference_mode():
        row = measure_case(case, torch.device("cuda", 0), budget_s=0.2)
    assert (row["status"], row["different"]) == ("ok", 0)
