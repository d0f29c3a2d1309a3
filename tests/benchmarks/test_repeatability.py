"""The two numbers of repeatability, from made-up measurements and once from a real, tiny one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.repeatability import (
    Kernel,
    RepeatabilityRow,
    list_kernels,
    run_trials,
    summarise_rows,
)
from torch_cudal1.judge.benchmark.protocol import Measurement
from torch_cudal1.judge.benchmark.statistics import summarise
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS

FAST = TIMING_PLANS["fast"]


def make_measurement(ratio: float) -> Measurement:
    return Measurement(FAST, {"hot": summarise([(100.0 * ratio, 100.0)] * 56)}, (1.0, 1.0), 1, 0.1)


def make_rows(ratios: list[float], twice: float) -> list[RepeatabilityRow]:
    row = RepeatabilityRow("kernel", twice={"hot": twice})
    for ratio in ratios:
        row.add(make_measurement(ratio))
    return [row]


@pytest.mark.parametrize(
    ("ratios", "twice", "passed"),
    [
        ([1.0] * 200, 0.019, True),
        ([1.0] * 199 + [1.06], 0.0, True),  # one in two hundred
        ([1.0] * 198 + [1.06, 1.06], 0.0, False),
        ([1.04] * 200, 0.0, True),  # above 1, but no swap
        ([1.0] * 200, 0.021, False),
        ([], 0.0, False),
    ],
)
def test_under_one_percent_called_faster_and_under_two_percent_apart(
    ratios: list[float], twice: float, passed: bool
) -> None:
    assert summarise_rows(make_rows(ratios, twice), judged=True)["passed"] is passed
    assert summarise_rows(make_rows(ratios, twice), judged=False)["passed"] is None


def test_a_row_has_the_spread_of_its_trials() -> None:
    (row,) = make_rows([1.0, 1.1], 0.0)
    values = row.to_json()
    assert (values["trials"], values["faster"], values["above_one"], values["unsteady"]) == (
        2,
        1,
        1,
        0,
    )
    assert values["most_apart"]["hot"] == pytest.approx(0.05)
    assert values["most_log_speedup"] == pytest.approx(0.0953, abs=1e-4)


def test_each_side_has_inputs_of_its_own() -> None:
    addresses: list[int] = []

    def make(device: torch.device):  # type: ignore[no-untyped-def]
        x = torch.ones(64, device=device)
        addresses.append(x.data_ptr())
        return lambda: x + x

    (row,) = run_trials(
        torch.device("cpu"), 2, replace(FAST, side_us=800.0, rounds=1), [Kernel("add", make)]
    )
    assert row.trials == 2
    assert len(set(addresses)) == 2
    assert len(row.us["hot"]) == 2


def test_sizes_span_orders_of_magnitude() -> None:
    names = [kernel.name for kernel in list_kernels(torch.device("cpu"))]
    assert len(set(names)) == len(names) >= 10
