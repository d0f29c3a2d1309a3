"""A small experiment in the synthetic world: what cells share, what a kill costs, and what a result
says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.training.world import TASKS, Rules, SyntheticCodec, SyntheticEvaluator
from torch_cudal1.core.errors import SettingError
from torch_cudal1.ingest.llm.policy import TinySpec
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.training.environment import Environment
from torch_cudal1.training.experiments.arm_runner import run_arm, train_base
from torch_cudal1.training.experiments.plan import ARMS, ExperimentPlan, HeldOut, read_plan
from torch_cudal1.training.experiments.plan_runner import (
    ExecutionConfig,
    read_results,
    run_plan,
    run_plan_in_process,
)
from torch_cudal1.training.grpo import GrpoConfig
from torch_cudal1.training.stages import CollectConfig, SelfsupConfig, ignore_progress
from torch_cudal1.training.supervised import FitConfig

FIT = FitConfig(steps=20, batch=8, learning_rate=5e-3)
PLAN = ExperimentPlan(
    name="small",
    device="cpu",
    endpoint="none: a test",
    arms=("A0", "A4", "A6"),
    seeds=(0, 1),
    budget=20,
    max_new_tokens=4,
    model=TinySpec(hidden=32, layers=1, heads=2, context=64),
    collect=CollectConfig(attempts=4),
    sft=FIT,
    selfsup=SelfsupConfig(rounds=1, samples=4, fit=replace(FIT, steps=5)),
    rl=GrpoConfig(steps=4, group=4, groups=2, epochs=1, save_every=1),
    held_out=HeldOut(measurements=6, cap=16, round=4, reported=(1, 4, 6)),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_environment(
    plan: ExperimentPlan = PLAN, seed: int = 0, evaluator: SyntheticEvaluator | None = None
) -> Environment:
    generators = [Rules("one", ["a0 b0", "a1 b3", "a2 b2"]), Rules("two", ["a3 b1", "a2 b0"])]
    held_out = {"shape": TASKS[4:5], "family": TASKS[5:]}
    return Environment(
        "synthetic",
        SyntheticCodec(),
        evaluator or SyntheticEvaluator(),
        generators,
        TASKS[:4],
        held_out,
    )


def refuse_environment(plan: ExperimentPlan, seed: int) -> Environment:
    raise AssertionError("a result that is there is not computed again")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiment")
    run_plan(PLAN, make_environment, ExecutionConfig(folder, workers=1), ignore_progress)
    return folder


def test_every_cell_has_a_result_that_says_what_it_is(finished):
    results = read_results(finished, PLAN)
    assert [(one["arm"], one["seed"]) for one in results] == [
        (arm, seed) for arm in PLAN.arms for seed in PLAN.seeds
    ]
    assert {one["label"] for one in results} == {"synthetic"}
    assert all(set(one["held_out"][one["own"]]) == {"t4", "t5"} for one in results)


def test_cells_of_a_seed_share_their_stages_and_what_they_find_on_held_out_tasks(finished):
    results = {(one["arm"], one["seed"]): one for one in read_results(finished, PLAN)}
    assert results["A4", 0]["stages"] == results["A6", 0]["stages"]
    assert results["A4", 0]["stages"] != results["A4", 1]["stages"]
    found = [
        [
            line
            for line in (finished / PLAN.digest / "seed-0" / arm / name).read_text().splitlines()
            if '"found/' in line
        ]
        for arm, name in (("A4", "held-out-none.jsonl"), ("A6", "held-out-bucket.jsonl"))
    ]
    assert found[0] == found[1] != []


def test_the_budget_counts_different_programs(finished):
    for one in read_results(finished, PLAN):
        spent = [step["programs"] for step in one["curve"]]
        assert all(before < PLAN.budget for before in spent[:-1])
        assert spent == sorted(spent)


def test_a_held_out_curve_never_falls_and_its_best_is_its_end(finished):
    for one in read_results(finished, PLAN):
        for test in one["held_out"][one["own"]].values():
            known = [score for score in test["curve"] if score is not None]
            assert known == sorted(known)
            assert len(test["curve"]) <= 6
            assert test["best"]["6"] == (test["curve"][-1] if test["curve"] else None)
            assert test["samples"] <= 16


def test_a_finished_plan_computes_nothing_again(finished):
    assert len(run_plan(PLAN, refuse_environment, ExecutionConfig(finished), ignore_progress)) == 6


def test_a_bench_that_cannot_be_shared_gives_the_same_results_here(finished, tmp_path):
    plan = replace(PLAN, seeds=(0,), arms=("A4",))
    assert run_plan_in_process(
        plan, make_environment(), ExecutionConfig(tmp_path), ignore_progress
    ) == read_results(finished, plan)


def test_where_nothing_that_was_collected_is_right_the_plan_is_told(tmp_path: Path) -> None:
    class Refusing(SyntheticEvaluator):
        def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
            return [Measured(task.id, one.program, "wrong") for one in programs]

    with pytest.raises(SettingError, match=r"small.*a success"):
        train_base(PLAN, make_environment(evaluator=Refusing()), 0, tmp_path)


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


def test_fewer_tasks_are_spread_over_all():
    limited = make_environment().limit_tasks(replace(PLAN, train_tasks=2, held_out_tasks=0))
    assert [task.id for task in limited.train] == ["t0", "t2"]
    assert limited.held_out_tasks == ()
    assert make_environment().limit_tasks(PLAN).train == TASKS[:4]


def test_results_of_another_plan_are_not_taken(finished):
    assert read_results(finished, replace(PLAN, budget=21)) == []
    assert len(read_results(finished, replace(PLAN, seeds=(1,)))) == 3, (
        "fewer seeds are the same experiment"
    )


def test_a_cell_that_was_killed_ends_as_if_it_had_not_been(tmp_path):
    whole = run_arm(PLAN, make_environment(), ARMS["A6"], 0, tmp_path / "whole")
    for dies_after in (2, 25, 5):
        with pytest.raises(KeyboardInterrupt):
            run_arm(
                PLAN,
                make_environment(evaluator=SyntheticEvaluator(dies_after)),
                ARMS["A6"],
                0,
                tmp_path / "cut",
            )
    assert run_arm(PLAN, make_environment(), ARMS["A6"], 0, tmp_path / "cut") == whole
    assert json.loads(json.dumps(whole, allow_nan=False)) == whole


def test_the_base_without_analysis_is_another_one(tmp_path):
    first = train_base(PLAN, make_environment(), 0, tmp_path)
    assert train_base(PLAN, make_environment(), 0, tmp_path, analysis=False) != first


@pytest.mark.parametrize("name", sorted(ARMS))
def test_each_arm_differs_from_the_papers_method_in_what_its_title_says(name):
    apart = {
        key for key, value in asdict(ARMS[name]).items() if value != asdict(ARMS["A6"])[key]
    } - {"name", "title"}
    expected: dict[str, set[str]] = {
        "A0": {"start", "learns", "selector"}, "A1": {"start", "learns", "selector"}, "A2": {"learns", "selector"},
        "A3": {"learns"}, "A6": set(), "A8": {"without_analysis"}, "A9": {"smoothed"}, "A10": {"reward"}, "A11": {"objective"},
        "A12": {"start", "learns", "selector"},
    }  # fmt: skip
    assert apart == expected.get(name, {"selector"})


def test_arms_that_learn_nothing_run_too(tmp_path):
    small = replace(
        PLAN, budget=6, held_out=replace(PLAN.held_out, measurements=2, cap=4, reported=(1, 2))
    )
    climber = Rules("mutant", ["a1 b0", "a1 b1", "a2 b1"])
    environment = replace(make_environment(), generators=(*make_environment().generators, climber))
    for arm in (ARMS["A1"], ARMS["A3"], ARMS["A12"]):
        found = run_arm(small, environment, arm, 0, tmp_path)
        assert found["curve"][-1]["programs"] >= 1, arm.name
        assert set(found["held_out"][arm.selector]) == {"t4", "t5"}


PLANS = sorted((Path(__file__).parents[2] / "benchmarks" / "training").glob("*.json"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_plans_of_the_repository_are_plans_that_say_what_counts(path):
    plan = read_plan(path)
    assert len(plan.endpoint) > 50
    compared = (
        {"A4"} if "red team" in plan.name else {"A4", "A6"}
    )  # a red team compares evaluators of one arm, not arms
    assert compared <= set(plan.arms)


def test_a_plan_file_is_read_and_its_digest_is_of_what_decides(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(asdict(PLAN)))
    assert read_plan(path) == PLAN
    assert replace(PLAN, seeds=(5,)).digest == PLAN.digest != replace(PLAN, budget=21).digest


def _wrong(**change: object) -> dict[str, object]:
    return {**asdict(PLAN), **change}


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ([], "plan"),
        (_wrong(budgt=1), "budgt"),
        (_wrong(device="tpu"), "device"),
        (_wrong(arms=["A99"]), "A99"),
        (_wrong(rl={"group": "8"}), "rl.group"),
        (_wrong(rl={"smoothing": {"pool": "all"}}), "smoothing.pool"),
        (_wrong(seeds=[1, 1]), "seeds"),
        ({"name": "x"}, "device"),
    ],
)
def test_a_plan_that_is_none_is_refused_by_name(tmp_path, told, named):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(told))
    with pytest.raises(SettingError, match=named):
        read_plan(path)


def test_a_file_that_is_no_json_is_refused(tmp_path):
    with pytest.raises(SettingError, match="JSON"):
        read_plan(tmp_path / "missing.json")


def test_numbers_in_a_result_are_finite(finished):
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
        math.isfinite(number) for one in read_results(finished, PLAN) for number in numbers(one)
    )
