"""Plans in the synthetic world: all arms and seeds, what an end by budget costs, and what a result
says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.small_experiment import PLAN, make_environment
from torch_cudal1.training.environment import Environment
from torch_cudal1.training.experiments.plan import ExperimentPlan
from torch_cudal1.training.experiments.plan_runner import (
    ExecutionConfig,
    read_results,
    run_plan,
    run_plan_in_process,
)
from torch_cudal1.training.stages import ignore_progress

pytestmark = pytest.mark.usefixtures("one_thread")


def refuse_environment(plan: ExperimentPlan, seed: int) -> Environment:
    raise AssertionError("a result that is there is not computed again")


@pytest.fixture(scope="module")
def finished_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiment")
    run_plan(PLAN, make_environment, ExecutionConfig(folder, workers=1), ignore_progress)
    return folder


def test_every_cell_has_a_result_that_says_what_it_is(finished_folder):
    results = read_results(finished_folder, PLAN)
    assert [(result["arm"], result["seed"]) for result in results] == [
        (arm, seed) for arm in PLAN.arms for seed in PLAN.seeds
    ]
    assert {result["label"] for result in results} == {"synthetic"}
    assert all(set(result["held_out"][result["own"]]) == {"t4", "t5"} for result in results)


def test_cells_of_a_seed_share_their_stages_and_what_they_find_on_held_out_tasks(finished_folder):
    results = {
        (result["arm"], result["seed"]): result for result in read_results(finished_folder, PLAN)
    }
    assert results["A4", 0]["stages"] == results["A6", 0]["stages"]
    assert results["A4", 0]["stages"] != results["A4", 1]["stages"]
    programs = [
        [
            line
            for line in (finished_folder / PLAN.digest / "seed-0" / arm / name)
            .read_text()
            .splitlines()
            if '"found/' in line
        ]
        for arm, name in (("A4", "held-out-none.jsonl"), ("A6", "held-out-bucket.jsonl"))
    ]
    assert programs[0] == programs[1] != []


def test_the_budget_counts_different_programs(finished_folder):
    for result in read_results(finished_folder, PLAN):
        spent = [step["programs"] for step in result["curve"]]
        assert all(before < PLAN.budget for before in spent[:-1])
        assert spent == sorted(spent)


def test_a_held_out_curve_never_falls_and_its_best_is_its_end(finished_folder):
    for result in read_results(finished_folder, PLAN):
        for test in result["held_out"][result["own"]].values():
            scores = [score for score in test["curve"] if score is not None]
            assert scores == sorted(scores)
            assert len(test["curve"]) <= 6
            assert test["best"]["6"] == (test["curve"][-1] if test["curve"] else None)
            assert test["samples"] <= 16


def test_a_finished_plan_computes_nothing_again(finished_folder):
    assert (
        len(run_plan(PLAN, refuse_environment, ExecutionConfig(finished_folder), ignore_progress))
        == 6
    )


def test_a_bench_that_cannot_be_shared_gives_the_same_results_here(finished_folder, tmp_path):
    plan = replace(PLAN, seeds=(0,), arms=("A4",))
    assert run_plan_in_process(
        plan, make_environment(), ExecutionConfig(tmp_path), ignore_progress
    ) == read_results(finished_folder, plan)


def test_a_budget_that_is_spent_ends_the_run_and_the_next_one_goes_on(tmp_path):
    plan = replace(PLAN, seeds=(0,), arms=("A4",))
    assert (
        run_plan_in_process(
            plan, make_environment(), ExecutionConfig(tmp_path, budget_s=0.0), ignore_progress
        )
        == []
    )
    assert (
        len(
            run_plan_in_process(
                plan, make_environment(), ExecutionConfig(tmp_path), ignore_progress
            )
        )
        == 1
    )


def test_results_of_another_plan_are_not_taken(finished_folder):
    assert read_results(finished_folder, replace(PLAN, budget=21)) == []
    assert len(read_results(finished_folder, replace(PLAN, seeds=(1,)))) == 3, (
        "fewer seeds are the same experiment"
    )


def test_numbers_in_a_result_are_finite(finished_folder):
    def numbers(value: object) -> Iterator[float]:
        if isinstance(value, float):
            yield value
        elif isinstance(value, dict):
            for each in value.values():
                yield from numbers(each)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for each in value:
                yield from numbers(each)

    assert all(
        math.isfinite(number)
        for result in read_results(finished_folder, PLAN)
        for number in numbers(result)
    )
