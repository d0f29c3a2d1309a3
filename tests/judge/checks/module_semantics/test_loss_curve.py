"""The loss of a training run stays as near to float64's as twice eager's does."""

from __future__ import annotations

import pytest
import torch

from tests.judge.checks.module_sources import ModuleBench, ModuleCase, format_backward
from torch_cudal1.judge.checks.module_semantics.loss_curve import LOSS_CURVE, _compare_curves

EXACT = [1.0, 0.9, 0.8]


def test_a_curve_as_near_as_eagers_passes() -> None:
    check = _compare_curves([1.0, 0.91, 0.81], [1.0, 0.91, 0.81], EXACT, torch.float32)
    assert check.passed
    assert "over 2 steps" in check.detail


def test_a_curve_that_drifts_is_refused_at_its_step() -> None:
    check = _compare_curves([1.0, 0.9, 0.85], [1.0, 0.9, 0.8], EXACT, torch.float32)
    assert not check.passed
    assert "after 2 steps" in check.detail


def test_nan_is_no_small_error() -> None:
    assert not _compare_curves([1.0, float("nan"), 0.8], EXACT, EXACT, torch.float32).passed


SAME = "Same.apply(self.plain(x, y))"
TIRED = """
CALLS = [0]
class Tired(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r): return r * 1
    @staticmethod
    def backward(ctx, g):
        CALLS[0] += 1
        return g * (CALLS[0] < 30)
"""
MODULES: dict[str, ModuleCase] = {
    "a backward that gives up after thirty calls": (
        {"top": TIRED, "result": "Tired.apply(self.plain(x, y))"},
        "strict",
        (LOSS_CURVE,),
        "grad",
    ),
    "a gradient two percent too small": (
        {"top": format_backward("0.98 * g"), "result": SAME},
        "strict",
        (LOSS_CURVE,),
        "grad",
    ),
    "a backward of its own that holds on": (
        {"top": format_backward("g * 1"), "result": SAME},
        "strict",
        (LOSS_CURVE,),
        None,
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_source_that_trains_otherwise_is_refused_and_an_honest_source_passes(
    module_bench: ModuleBench, name: str
) -> None:
    module_bench.assert_verdict(MODULES[name])
