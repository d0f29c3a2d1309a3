"""A curve may leave float64's as far as twice what eager's does; what trains is in test_detectors_state."""

from __future__ import annotations

import torch

from torch_cudal1.judge.checks.module_semantics.loss_curve import _compare_curves

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
