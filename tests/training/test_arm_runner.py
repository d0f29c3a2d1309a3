"""One arm with one seed: what arms share, and going on after a kill."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.small_experiment import PLAN, make_environment
from tests.training.world import Rules, SyntheticEvaluator
from torch_cudal1.core.errors import SettingError
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.training.experiments.arm_runner import run_arm, train_base
from torch_cudal1.training.experiments.plan import ARMS

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_collection_without_a_right_program_stops_the_plan_with_the_reason(
    tmp_path: Path,
) -> None:
    class Refusing(SyntheticEvaluator):
        def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
            return [Measured(task.id, program.program, "wrong") for program in programs]

    with pytest.raises(SettingError, match=r"small.*a success"):
        train_base(PLAN, make_environment(evaluator=Refusing()), 0, tmp_path)


def test_a_cell_that_was_killed_ends_as_if_it_had_not_been(tmp_path):
    uninterrupted = run_arm(PLAN, make_environment(), ARMS["A6"], 0, tmp_path / "whole")
    for dies_after in (2, 25, 5):
        with pytest.raises(KeyboardInterrupt):
            run_arm(
                PLAN,
                make_environment(evaluator=SyntheticEvaluator(dies_after)),
                ARMS["A6"],
                0,
                tmp_path / "cut",
            )
    assert run_arm(PLAN, make_environment(), ARMS["A6"], 0, tmp_path / "cut") == uninterrupted
    assert json.loads(json.dumps(uninterrupted, allow_nan=False)) == uninterrupted


def test_the_base_without_analysis_is_another_one(tmp_path):
    first = train_base(PLAN, make_environment(), 0, tmp_path)
    assert train_base(PLAN, make_environment(), 0, tmp_path, analysis=False) != first


def test_arms_that_learn_nothing_run_too(tmp_path):
    small = replace(
        PLAN, budget=6, held_out=replace(PLAN.held_out, measurements=2, cap=4, reported=(1, 2))
    )
    climber = Rules("mutant", ["a1 b0", "a1 b1", "a2 b1"])
    environment = replace(make_environment(), generators=(*make_environment().generators, climber))
    for arm in (ARMS["A1"], ARMS["A3"], ARMS["A12"]):
        result = run_arm(small, environment, arm, 0, tmp_path)
        assert result["curve"][-1]["programs"] >= 1, arm.name
        assert set(result["held_out"][arm.selector]) == {"t4", "t5"}
