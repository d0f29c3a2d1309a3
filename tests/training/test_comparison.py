"""What may be said of arms, on results whose truth is known, and the page that says it."""

from __future__ import annotations

import random

import pytest

from tests.training.known_results import PLAN, TASKS, arms, result
from torch_cudal1.training.experiments.comparison import (
    compare_arms,
    compare_exemplar_effects,
    compare_stages,
    compute_optimum_means,
    summarize_arms,
    tabulate_stages,
)
from torch_cudal1.training.experiments.experiment_report import render_experiment_page


def test_the_primary_comparison_comes_first_and_finds_what_is_there():
    first = compare_arms(arms({"A4": 0.0, "A6": 0.2}), PLAN)[0]
    assert (first.one, first.other, first.kind, first.primary) == ("A6", "A4", "shape", True)
    assert first.difference.value == pytest.approx(0.1823, abs=1e-3)  # log 1.2
    assert first.says == "A6 is better"
    assert first.adjusted == first.difference.p, "the primary endpoint needs no correction"
    assert (first.difference.seeds, first.difference.tasks) == (4, 8)


def test_a_tie_is_published_as_one():
    comparisons = compare_arms(arms({"A4": 0.1, "A6": 0.1}), PLAN)
    assert all(comparison.says == "no difference shown" for comparison in comparisons)
    assert {comparison.kind for comparison in comparisons} == {"shape", "family"}


def test_a_loss_is_published_as_one():
    assert compare_arms(arms({"A4": 0.2, "A6": 0.0}), PLAN)[0].says == "A4 is better"


def test_the_other_comparisons_are_corrected_for_their_number():
    comparisons = compare_arms(arms({"A4": 0.0, "A5": 0.01, "A6": 0.02, "A7": 0.0}), PLAN)
    secondary = [comparison for comparison in comparisons if not comparison.primary]
    assert all(comparison.adjusted >= comparison.difference.p for comparison in secondary)
    assert any(comparison.adjusted > comparison.difference.p for comparison in secondary)


def test_only_seeds_that_both_arms_have_are_compared():
    results = arms({"A4": 0.0}, seeds=5) + arms({"A6": 0.0}, seeds=3)
    assert compare_arms(results, PLAN)[0].difference.seeds == 3
    assert compare_arms(arms({"A6": 0.0}), PLAN) == []


def test_a_task_without_a_success_counts_as_the_reference():
    results = [result("A4", seed, failing=8) for seed in range(3)] + [
        result("A6", seed) for seed in range(3)
    ]
    best = {summary.arm: summary.best["shape 4"] for summary in summarize_arms(results, PLAN)}
    assert best["A4"] == 1.0
    assert best["A6"] > 1.5
    assert compare_arms(results, PLAN)[0].says == "A6 is better"


def test_training_and_testing_with_exemplars_are_compared_separately():
    effects = compare_exemplar_effects(arms({"A4": 0.0, "A6": 0.2}), PLAN)
    assert effects["trained with - without, tested with"].value == pytest.approx(0.1823, abs=1e-3)
    assert effects["tested with - without, trained with"].value == 0.0


def test_the_rise_of_success_and_speed_is_paired_by_seed():
    differences = compare_stages(arms({"A4": 0.0, "A6": 0.3}))
    assert differences["success, stage 2 - stage 1"].value == pytest.approx(0.2)
    assert differences["log speed-up, A6 - stage 2"].value == pytest.approx(0.3)
    assert differences["success, stage 2 - stage 1"].seeds == 4


def test_stages_are_in_the_papers_columns_with_both_denominators():
    missing_as_zero, missing_as_one = tabulate_stages(arms({"A6": 0.0}))[0]
    assert (missing_as_zero.name, missing_as_zero.success, missing_as_zero.tasks) == (
        "Stage 1 (SFT)",
        44,
        48,
    )
    assert (missing_as_zero.missing, missing_as_one.missing) == (0.0, 1.0)
    assert missing_as_zero.mean < missing_as_one.mean


def test_the_ceiling_is_shown_where_every_program_was_measured():
    results = [result("A6", seed, with_optimum=True) for seed in range(2)]
    assert compute_optimum_means(results) == pytest.approx({"shape": 2.0, "family": 2.0})
    (summary,) = summarize_arms(results, PLAN)
    fractions = [
        1.5 + random.Random(f"{seed}/{task}").random() >= 1.9
        for seed in range(2)
        for task in TASKS[:8]
    ]
    assert summary.reached["shape"] == sum(fractions) / len(fractions)
    assert 0 < summary.reached["shape"] < 1
    assert "the best there is" in render_experiment_page(PLAN, results, {})
    assert compute_optimum_means(arms({"A6": 0.0})) == {}
