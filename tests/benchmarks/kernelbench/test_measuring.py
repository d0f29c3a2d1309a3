"""Columns are measured on a quiet GPU, for long enough, and compared with the fastest right
baseline.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.kernelbench import measuring
from benchmarks.kernelbench.job import COMPILE, EAGER, OURS
from benchmarks.kernelbench.loading import (
    Demand,
)
from tests.benchmarks.kernelbench.examples import CPU, JOB
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.peaks import DevicePeaks


def test_measuring_waits_until_the_gpu_answers_at_once() -> None:
    """Another process's kernels: an answer takes milliseconds, then no longer."""
    until = time.monotonic() + 0.3
    assert measuring.is_drained(lambda: time.sleep(0.003 if time.monotonic() < until else 2e-5))
    assert time.monotonic() > until
    assert not measuring.is_drained(lambda: time.sleep(0.003), limit_s=0.2)


@pytest.mark.parametrize(
    ("needs", "floor"), [(Demand(0, 4_000_000, 0), 1.0), (Demand(0, 4_000_000, 3_000_000_000), 6.0)]
)
def test_the_floor_is_the_larger_of_bytes_and_products(
    monkeypatch: pytest.MonkeyPatch, needs: Demand, floor: float
) -> None:
    monkeypatch.setattr(
        measuring, "find_device_peaks", lambda device: DevicePeaks({4: 5e14}, 4e12, 0.0)
    )
    assert measuring.compute_lower_bound_us(needs, torch.device("cuda")) == pytest.approx(floor)
    assert measuring.compute_lower_bound_us(needs, CPU) is None
    refusal = Refusal("no peak rates known for it")
    monkeypatch.setattr(measuring, "find_device_peaks", lambda device: refusal)
    assert measuring.compute_lower_bound_us(needs, torch.device("cuda")) is None


def test_the_best_baseline_is_the_fastest_that_is_right() -> None:
    samples = {EAGER: [10.0] * 14, COMPILE: [5.0] * 14, OURS: [4.0] * 14}
    measured = measuring.Measured(samples, {}, {})
    columns: dict[str, dict[str, Any]] = {
        name: {"status": "ok", "us": values[0]} for name, values in samples.items()
    }
    best, ratios = measuring.compute_ratios(measured, JOB, columns, None)
    assert (best, ratios[OURS]["best"]["speedup"], ratios[OURS][EAGER]["speedup"]) == (
        COMPILE,
        1.25,
        2.5,
    )
    assert ratios[COMPILE]["best"]["speedup"] == 1.0
    columns[COMPILE]["status"] = "wrong"
    best, ratios = measuring.compute_ratios(measured, JOB, columns, None)
    assert (best, ratios[OURS]["best"]["speedup"], COMPILE in ratios[OURS]) == (EAGER, 2.5, False)


def test_a_window_is_filled_and_otherwise_seven_rounds_are_enough() -> None:
    runs = {"a": lambda: None, "b": lambda: None}
    short = measuring._collect_samples(
        runs, CPU, replace(JOB, profile=replace(JOB.profile, measure_s=1e-6))
    )
    assert min(map(len, short.values())) >= 7
    window = replace(JOB, profile=replace(JOB.profile, measure_s=1.0, window=True))
    assert min(map(len, measuring._collect_samples(runs, CPU, window).values())) > 30
