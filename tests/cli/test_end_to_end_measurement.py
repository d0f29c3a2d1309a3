"""Errors and times of whole modules, and the demo's models."""

from __future__ import annotations

import math

import pytest
import torch

from tests.virtual_clock import VirtualClock, install_virtual_clock
from torch_cudal1.cli.commands import end_to_end_measurement

REFERENCE = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
RMS = math.sqrt(25 / 3)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([3.0, 4.0, 0.0], 0.0),
        ([3.0, 4.5, 0.0], 0.5 / RMS),
        ([3.0, math.nan, 0.0], math.inf),
        ([3.0, math.inf, 0.0], math.inf),
    ],
)
def test_an_error_is_scaled_by_the_output_and_a_nan_is_infinitely_wrong(
    output: list[float], expected: float
) -> None:
    error = end_to_end_measurement.compute_scaled_error(torch.tensor(output), REFERENCE)
    assert error == pytest.approx(expected)


def test_nan_and_infinity_in_the_same_places_are_right() -> None:
    special = torch.tensor([math.nan, math.inf, 1.0])
    assert end_to_end_measurement.compute_scaled_error(special, special.double()) == 0.0


def test_every_output_counts_and_integers_do_not() -> None:
    output = (REFERENCE.float(), {"n": torch.tensor(3)}, REFERENCE.float() + 1)
    reference = (REFERENCE, {"n": torch.tensor(9)}, REFERENCE)
    assert end_to_end_measurement.compute_scaled_error(output, reference) == pytest.approx(1 / RMS)


def test_without_a_reference_there_is_no_error() -> None:
    assert end_to_end_measurement.compute_scaled_error(REFERENCE, None) is None


class Timed(torch.nn.Module):
    """Takes as long as it is told to, on a clock that only it advances."""

    def __init__(self, clock: VirtualClock, microseconds: float) -> None:
        super().__init__()
        self.clock, self.microseconds = clock, microseconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.advance(self.microseconds)
        return torch.tanh(x)


def test_a_faster_module_is_measured_as_faster_and_a_missing_compiler_is_a_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = install_virtual_clock(monkeypatch)
    monkeypatch.setattr(end_to_end_measurement, "_compile_module", lambda module, inputs: None)
    timed = end_to_end_measurement.time_end_to_end(
        Timed(clock, 300.0), Timed(clock, 100.0), (torch.ones(16),), budget_s=0.5
    )
    assert timed.vs_eager.low == pytest.approx(timed.vs_eager.value) == pytest.approx(3.0)
    assert (timed.eager_us, timed.ours_us) == pytest.approx((300.0, 100.0))
    assert timed.vs_inductor is None
    assert timed.inductor_us is None


def test_where_eager_runs_itself_it_is_one_by_construction_and_only_torch_compile_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eager = Timed(install_virtual_clock(monkeypatch), 100.0)
    monkeypatch.setattr(
        end_to_end_measurement,
        "_compile_module",
        lambda module, inputs: lambda: eager(eager(inputs[0])),
    )
    timed = end_to_end_measurement.time_end_to_end(eager, None, (torch.ones(16),), budget_s=0.5)
    assert (timed.vs_eager.low, timed.vs_eager.value, timed.vs_eager.high) == (1.0, 1.0, 1.0)
    assert timed.vs_inductor is not None
    assert timed.vs_inductor.value == pytest.approx(2.0)
    assert timed.eager_us == timed.ours_us
