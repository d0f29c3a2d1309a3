"""The least time of a region: what must pass the memory or be calculated, and nothing that might be
left out.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.peaks import MAX_PEAK_FRACTION, DevicePeaks
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.program import Program
from torch_cudal1.search import lower_bound

GPU = torch.device("cuda")
LIMITS = DevicePeaks(
    {1: 4e15, 2: 2e15, 4: 1e14, 8: 1e13}, 1e12, 1e6
)  # bytes of float32: a microsecond moves 1e6 of them


class Half(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:512] * 2


class Picked(nn.Module):
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return x[at]


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_bound, "find_device_peaks", lambda device: LIMITS)


def program(module: nn.Module, *inputs: torch.Tensor) -> Program:
    with torch.no_grad():
        (region,) = capture_regions(module.eval(), inputs)
    return region.program


def microseconds(moved: int) -> float:
    return (moved - 1e6) / 1e6 / MAX_PEAK_FRACTION


X = torch.randn(1024, 1024)
BYTES = X.nbytes


@pytest.mark.parametrize(
    ("module", "inputs", "moved"),
    [
        (nn.ReLU(), (X,), 2 * BYTES),
        (nn.Softmax(-1), (X,), 2 * BYTES),
        (Half(), (X,), BYTES // 2),  # of what is only looked at, nobody knows how much is read
        (Picked(), (X, torch.arange(256)), BYTES // 4),
    ],
    ids=["element-wise", "rows", "a view", "a choice of rows"],
)
def test_what_passes_the_memory_at_least(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], moved: int
) -> None:
    assert lower_bound.lower_bound_us(program(module, *inputs), GPU) == pytest.approx(
        max(0.0, microseconds(moved))
    )


def test_a_large_product_is_bound_by_its_operations() -> None:
    layer = program(nn.Linear(4096, 4096, bias=False), torch.randn(4096, 4096))
    assert lower_bound.lower_bound_us(layer, GPU) == pytest.approx(
        2 * 4096**3 / 1e14 * 1e6 / MAX_PEAK_FRACTION
    )


def test_a_program_that_cannot_be_estimated_has_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(program: Program) -> None:
        raise AssertionError("heads of another size")

    monkeypatch.setattr(lower_bound, "count_required_work", fails)
    telemetry.reset()
    assert lower_bound.lower_bound_us(program(nn.ReLU(), X), GPU) == 0.0
    assert telemetry.report().counters["search.no_floor"] == 1


def test_a_device_without_known_peaks_has_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    relu = program(nn.ReLU(), X)
    assert lower_bound.lower_bound_us(relu, torch.device("cpu")) == 0.0
    monkeypatch.setattr(
        lower_bound, "find_device_peaks", lambda device: Refusal("no peak rates known")
    )
    assert lower_bound.lower_bound_us(relu, GPU) == 0.0
