"""Answers are compared with a float64 run, or with eager where nothing was swapped in."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.kernelbench import verify
from benchmarks.kernelbench.loading import (
    make_inputs,
    make_module,
)
from tests.benchmarks.kernelbench.examples import CPU, load_source


def test_what_is_not_swapped_is_looked_at_as_a_baseline_is(tmp_path: Path) -> None:
    module = make_module(load_source(tmp_path), CPU, "eval")
    with torch.no_grad():
        expected = verify.compute_expected(module, make_inputs(load_source(tmp_path), CPU, 1))
        coarse = lambda *inputs: module(*inputs) * 1.0005
        assert "error" in verify.check_column(coarse, expected).reason
        assert verify.check_column(coarse, expected, swapped=False).reason == ""
        assert (
            verify.check_column(
                lambda *inputs: module(*inputs) * 1.1, expected, swapped=False
            ).reason
            != ""
        )


class Remembering(torch.nn.Module):
    """As released recurrent tasks do: a state in a plain attribute, moved to the device by each
    call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.GRU(4, 4)
        self.h0 = torch.randn(1, 2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h0 = self.h0.to(x.device)
        return self.cell(x, self.h0)[0]


def test_a_task_with_a_tensor_of_its_own_is_compared_with_float64() -> None:
    module, inputs = Remembering().eval(), (torch.randn(3, 2, 4),)
    with torch.no_grad():
        expected = verify.compute_expected(module, inputs)
        assert expected.why == ""
        assert verify.check_column(module, expected).by == "float64"
    assert module.h0.dtype == torch.float32
