"""Curves of an evaluation."""

from __future__ import annotations

from tests.training.known_results import TASKS, result
from torch_cudal1.training.experiments.policy_eval import compute_best_curve


def test_a_curve_of_bests_is_a_mean_over_tasks_that_never_falls():
    arm_result = result("A6", 0, failing=1)
    curve = compute_best_curve(arm_result["held_out"]["bucket"], TASKS)
    assert len(curve) == 4
    assert curve == sorted(curve)
