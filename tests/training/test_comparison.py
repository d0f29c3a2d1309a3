"""What may be said of arms, on results whose truth is known, and the page that says it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from torch_cudal1.training.experiments.comparison import (
    compare_arms,
    compare_exemplar_effects,
    compare_stages,
    compute_optimum_means,
    summarize_arms,
    tabulate_stages,
)
from torch_cudal1.training.experiments.experiment_report import (
    build_run_sections,
    build_tables,
    render_experiment_page,
)
from torch_cudal1.training.experiments.plan import ExperimentPlan, HeldOut
from torch_cudal1.training.experiments.policy_eval import compute_best_curve

PLAN = ExperimentPlan(
    name="known",
    device="cpu",
    endpoint="Made up.",
    held_out=HeldOut(measurements=4, cap=8, reported=(1, 4)),
)
TASKS = tuple(f"t{i}" for i in range(12))


def result(
    arm: str, seed: int, *, gain: float = 0.0, failing: int = 0, known: bool = False
) -> dict[str, Any]:
    """A result whose held-out bests are those of its seed and task times (1 + gain); the first
    `failing` tasks have none.
    """

    def tested(task: str) -> dict[str, Any]:
        best = (
            (1.5 + random.Random(f"{seed}/{task}").random()) * (1 + gain)
            if int(task[1:]) >= failing
            else None
        )
        curve = [best and best / 2, best and best / 2, best, best]
        return {
            "best": {"1": curve[0], "4": best},
            "curve": curve,
            "programs": 4,
            "samples": 4,
            "success": 1.0,
            "speedup": best or 0.0,
        }

    exam = {
        "success": 0.9,
        "speedup": 1.5 + gain,
        "log_speedup": 0.4 + gain,
        "best": dict.fromkeys(TASKS, 1.5),
        "samples": 8,
    }
    exam |= {"hack": 0.0, "undecodable": 0.0, "speedup_of_successes": 1.6}
    stages = {
        "sft": exam | {"success": 0.5 + seed / 100, "best": {**dict.fromkeys(TASKS, 1.2), "t0": None}},
        "selfsup": exam | {"success": 0.7 + seed / 100, "log_speedup": 0.4},
        "rounds": [], "rows": 10, "collected": {"rules": {"attempts": 20, "ok": 4, "wrong": 16}},
    }  # fmt: skip
    curve = [{"step": float(i), "programs": 4.0 * i, "best": 1.0 + i / 10, "success": 0.9, "speedup": 1.0, "hack": 0.0,
              "undecodable": 0.1} for i in range(12)]  # fmt: skip
    own = {"A4": "none", "A5": "random"}.get(arm, "bucket")
    tests = {
        name: {task: tested(task) for task in TASKS}
        for name in dict.fromkeys((own, "none", "bucket"))
    }
    optimum = dict.fromkeys(TASKS, 2.0) if known else {}
    kinds = {"shape": list(TASKS[:8]), "family": list(TASKS[8:])}
    told = {
        "plan": PLAN.digest,
        "label": "synthetic",
        "arm": arm,
        "seed": seed,
        "own": own,
        "kinds": kinds,
        "optimum": optimum,
    }
    return {**told, "stages": stages, "exam": exam, "curve": curve, "held_out": tests}


def arms(gains: Mapping[str, float], seeds: int = 4) -> list[dict[str, Any]]:
    return [result(arm, seed, gain=gain) for arm, gain in gains.items() for seed in range(seeds)]


def test_the_primary_comparison_comes_first_and_finds_what_is_there():
    first = compare_arms(arms({"A4": 0.0, "A6": 0.2}), PLAN)[0]
    assert (first.one, first.other, first.kind, first.primary) == ("A6", "A4", "shape", True)
    assert first.difference.value == pytest.approx(0.1823, abs=1e-3)  # log 1.2
    assert first.says == "A6 is better"
    assert first.adjusted == first.difference.p, "the primary endpoint needs no correction"
    assert (first.difference.seeds, first.difference.tasks) == (4, 8)


def test_a_tie_is_published_as_one():
    found = compare_arms(arms({"A4": 0.1, "A6": 0.1}), PLAN)
    assert all(one.says == "no difference shown" for one in found)
    assert {one.kind for one in found} == {"shape", "family"}


def test_a_loss_is_published_as_one():
    assert compare_arms(arms({"A4": 0.2, "A6": 0.0}), PLAN)[0].says == "A4 is better"


def test_the_other_comparisons_are_corrected_for_their_number():
    found = compare_arms(arms({"A4": 0.0, "A5": 0.01, "A6": 0.02, "A7": 0.0}), PLAN)
    others = [one for one in found if not one.primary]
    assert all(one.adjusted >= one.difference.p for one in others)
    assert any(one.adjusted > one.difference.p for one in others)


def test_only_seeds_that_both_arms_have_are_compared():
    results = arms({"A4": 0.0}, seeds=5) + arms({"A6": 0.0}, seeds=3)
    assert compare_arms(results, PLAN)[0].difference.seeds == 3
    assert compare_arms(arms({"A6": 0.0}), PLAN) == []


def test_a_task_without_a_success_counts_as_the_reference():
    results = [result("A4", seed, failing=8) for seed in range(3)] + [
        result("A6", seed) for seed in range(3)
    ]
    best = {one.arm: one.best["shape 4"] for one in summarize_arms(results, PLAN)}
    assert best["A4"] == 1.0
    assert best["A6"] > 1.5
    assert compare_arms(results, PLAN)[0].says == "A6 is better"


def test_training_and_testing_with_exemplars_are_told_apart():
    found = compare_exemplar_effects(arms({"A4": 0.0, "A6": 0.2}), PLAN)
    assert found["trained with - without, tested with"].value == pytest.approx(0.1823, abs=1e-3)
    assert found["tested with - without, trained with"].value == 0.0


def test_the_rise_of_success_and_speed_is_paired_by_seed():
    found = compare_stages(arms({"A4": 0.0, "A6": 0.3}))
    assert found["success, stage 2 - stage 1"].value == pytest.approx(0.2)
    assert found["log speed-up, A6 - stage 2"].value == pytest.approx(0.3)
    assert found["success, stage 2 - stage 1"].seeds == 4


def test_stages_are_in_the_papers_columns_with_both_denominators():
    zero, one = tabulate_stages(arms({"A6": 0.0}))[0]
    assert (zero.name, zero.success, zero.tasks) == ("Stage 1 (SFT)", 44, 48)
    assert (zero.missing, one.missing) == (0.0, 1.0)
    assert zero.mean < one.mean


def test_a_curve_of_bests_is_a_mean_over_tasks_that_never_falls():
    one = result("A6", 0, failing=1)
    curve = compute_best_curve(one["held_out"]["bucket"], TASKS)
    assert len(curve) == 4
    assert curve == sorted(curve)


def test_the_ceiling_is_shown_where_every_program_was_measured():
    results = [result("A6", seed, known=True) for seed in range(2)]
    assert compute_optimum_means(results) == pytest.approx({"shape": 2.0, "family": 2.0})
    (one,) = summarize_arms(results, PLAN)
    wanted = [
        1.5 + random.Random(f"{seed}/{task}").random() >= 1.9
        for seed in range(2)
        for task in TASKS[:8]
    ]
    assert one.reached["shape"] == sum(wanted) / len(wanted)
    assert 0 < one.reached["shape"] < 1
    assert "the best there is" in render_experiment_page(PLAN, results, {})
    assert compute_optimum_means(arms({"A6": 0.0})) == {}


def test_the_page_says_what_was_compared_and_warns_of_few_seeds():
    results = arms({"A4": 0.0, "A6": 0.2})
    cheats = {"naive": [{"step": 0.0, "cheats": 0.1, "believed": 0.1, "reported": 1.0}] * 3}
    page = render_experiment_page(PLAN, results, {"torch": "2"}, cheats=cheats)
    for expected in (
        "A6 - A4, held-out shape (primary)",
        "A6 is better",
        "4 seeds: intervals over so few",
        "synthetic",
        PLAN.digest,
    ):
        assert expected in page
    assert "intervals over so few" not in render_experiment_page(
        PLAN, arms({"A4": 0.0, "A6": 0.2}, seeds=8), {}
    )


def test_every_row_of_every_table_has_a_cell_for_every_column():
    results = arms({"A0": 0.0, "A4": 0.0, "A6": 0.2})
    sections = build_run_sections(results[0]["curve"], "synthetic")
    tables = [
        *build_tables(PLAN, results),
        *(part for section in sections for part in section.parts if hasattr(part, "rows")),
    ]
    assert len(tables) == 6
    for table in tables:
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_without_results_there_is_a_page_that_says_so():
    assert "no results" in render_experiment_page(PLAN, [], {})
