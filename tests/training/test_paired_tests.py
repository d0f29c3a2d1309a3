"""The arithmetic of an experiment, against cases that are known."""

from __future__ import annotations

import math
import statistics

import numpy
import pytest
import scipy.stats
import torch

from torch_cudal1.training.experiments.paired_tests import (
    adjust_by_holm,
    build_table_row,
    compute_area,
    estimate_difference,
)


def draw_arms(
    seeds: int, tasks: int, *, effect: float, random: torch.Generator
) -> tuple[list[list[float]], list[list[float]]]:
    """Two arms that share what is hard about a task and a seed, and differ by `effect` and noise."""
    shared = torch.randn(seeds, 1, generator=random) + 3 * torch.randn(1, tasks, generator=random)
    arms = [
        shared + shift + 0.2 * torch.randn(seeds, tasks, generator=random)
        for shift in (effect, 0.0)
    ]
    return arms[0].tolist(), arms[1].tolist()


def test_a_shift_of_every_pair_is_found_exactly():
    scores = [[2.0, 5.0, 9.0], [1.0, 0.0, 4.0]]
    difference = estimate_difference([[x + 0.5 for x in row] for row in scores], scores)
    assert (difference.value, difference.low, difference.high) == pytest.approx((0.5, 0.5, 0.5))
    assert difference.excludes_zero
    assert difference.p < 0.001


def test_pairing_removes_what_tasks_and_seeds_share():
    first, second = draw_arms(8, 20, effect=0.3, random=torch.Generator().manual_seed(1))
    difference = estimate_difference(first, second)
    assert difference.low > 0.2
    assert difference.high < 0.4


def test_intervals_of_no_difference_hold_zero_nineteen_times_in_twenty():
    random = torch.Generator().manual_seed(2)
    intervals_with_zero = sum(
        not estimate_difference(
            *draw_arms(8, 20, effect=0.0, random=random), draws=1000
        ).excludes_zero
        for _ in range(100)
    )
    assert 85 <= intervals_with_zero <= 100


def test_on_one_task_the_bootstrap_is_scipys_over_seeds():
    first, second = draw_arms(12, 1, effect=0.3, random=torch.Generator().manual_seed(3))
    difference = estimate_difference(first, second)
    expected = scipy.stats.bootstrap(
        ([row[0] for row in first], [row[0] for row in second]),
        lambda first, second, axis: numpy.mean(first, axis=axis) - numpy.mean(second, axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        rng=0,
    ).confidence_interval
    width = expected.high - expected.low
    assert difference.low == pytest.approx(expected.low, abs=0.05 * width)
    assert difference.high == pytest.approx(expected.high, abs=0.05 * width)


def test_seeds_that_disagree_widen_the_interval():
    alike = [[0.1] * 10] * 8
    disagreeing = [[0.1 + (0.5 if seed % 2 else -0.5)] * 10 for seed in range(8)]
    zero = [[0.0] * 10] * 8
    assert estimate_difference(alike, zero).excludes_zero
    assert not estimate_difference(disagreeing, zero).excludes_zero


def test_tasks_that_disagree_widen_the_interval_however_many_seeds_there_are():
    per_task = [1.0, -0.8, 1.0, -0.8]
    assert not estimate_difference([per_task] * 64, [[0.0] * 4] * 64).excludes_zero


@pytest.mark.parametrize(
    ("first", "second"),
    [([[1.0]], [[1.0, 2.0]]), ([], []), ([[math.nan]], [[1.0]]), ([[math.inf]], [[1.0]])],
)
def test_arms_that_cannot_be_compared_are_refused(first, second):
    with pytest.raises(ValueError, match="expected"):
        estimate_difference(first, second)


def test_holm_is_the_textbook_example():
    adjusted = adjust_by_holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})


def test_both_denominators_are_distinguished():
    scores = [2.0, 0.5, 1.005, None]
    missing_as_zero, missing_as_one = (
        build_table_row("x", scores, missing=0.0),
        build_table_row("x", scores, missing=1.0),
    )
    assert (missing_as_zero.success, missing_as_zero.counted, missing_as_zero.tasks) == (3, 1, 4)
    assert missing_as_zero.mean == pytest.approx(3.505 / 4)
    assert missing_as_one.mean == pytest.approx(4.505 / 4)
    assert (missing_as_zero.p25, missing_as_one.p25) == pytest.approx((0.375, 0.875))
    assert (
        missing_as_zero.geomean
        == missing_as_one.geomean
        == pytest.approx((2.0 * 0.5 * 1.005) ** 0.25)
    )
    assert missing_as_zero.geomean_scored == pytest.approx(
        statistics.geometric_mean([2.0, 0.5, 1.005])
    )
    assert missing_as_zero.fast == {1.0: 0.5, 1.5: 0.25, 2.0: 0.0}


def test_a_table_of_failures_has_no_geomean_of_successes():
    assert build_table_row("x", [None, None], missing=1.0).geomean_scored is None


@pytest.mark.parametrize(("scores", "missing"), [([], 1.0), ([1.0], 0.5)])
def test_a_table_without_tasks_or_with_another_denominator_is_refused(scores, missing):
    with pytest.raises(ValueError, match="expected"):
        build_table_row("x", scores, missing=missing)


def test_the_area_rewards_being_sooner():
    assert compute_area([2.0, 2.0, 2.0]) > compute_area([1.0, 1.0, 2.0])
    with pytest.raises(ValueError, match="at least one"):
        compute_area([])
