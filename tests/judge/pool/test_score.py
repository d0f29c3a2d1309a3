"""Seven bucket means are one score, or unstable."""

from __future__ import annotations

import math

import pytest

from torch_cudal1.judge.benchmark.quoted_speedup import Unstable
from torch_cudal1.judge.pool.score import bucket_means, score_of


def test_a_bucket_is_a_block_of_consecutive_runs_and_the_rest_is_not_used() -> None:
    ratios = [1.0, 3.0] * 7 + [100.0]
    assert bucket_means(ratios) == (2.0,) * 7
    assert bucket_means([float(run) for run in range(7)]) == tuple(float(run) for run in range(7))


def test_fewer_runs_than_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 7 runs, one a bucket, got 6"):
        bucket_means([1.0] * 6)


def test_the_score_is_the_median_of_the_means_rounded_towards_one() -> None:
    assert score_of([1.239] * 7, "cudal1") == 1.23
    assert score_of([0.761] * 7, "cudal1") == 0.77


def test_the_rules_differ_in_what_a_spread_is_relative_to() -> None:
    fast = [50.0 + 0.5 * bucket for bucket in range(7)]  # 3 % of 50
    assert isinstance(score_of(fast, "cudal1"), Unstable)
    assert score_of(fast, "strict") == 51.5


@pytest.mark.parametrize(
    "means", [[1.0] * 6, [1.0] * 8, [1.0] * 6 + [0.0], [1.0] * 6 + [math.inf], [math.nan] * 7]
)
def test_means_that_are_no_seven_finite_speedups_are_refused(means: list[float]) -> None:
    with pytest.raises(ValueError, match="expected 7 finite speed-ups above 0"):
        score_of(means, "cudal1")
