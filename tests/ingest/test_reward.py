from __future__ import annotations

import math

import pytest

from torch_cudal1.ingest.llm.reward import compute_reward
from torch_cudal1.judge.benchmark.quoted_speedup import Unstable, round_towards_one
from torch_cudal1.judge.evaluate.decide import is_surprising
from torch_cudal1.judge.pool.measured import Measured
from torch_cudal1.judge.pool.score import bucket_means, score_of

WRONG = Measured("t", "p", "wrong")


def ok(score: float) -> Measured:
    return Measured("t", "p", "ok", score)


def test_buckets_are_blocks_of_runs_and_not_ranges_of_values() -> None:
    assert bucket_means([1, 3, 2, 2, 5, 5, 1, 1, 4, 4, 9, 9, 7, 7]) == (2, 2, 5, 1, 4, 9, 7)
    assert bucket_means(range(7 * 3 + 2)) == tuple(3 * block + 1 for block in range(7))
    with pytest.raises(ValueError, match="at least 7 runs"):
        bucket_means([1.0] * 6)


@pytest.mark.parametrize(
    ("mean", "score"), [(1.118, 1.11), (0.992, 1.0), (2.30, 2.30), (1.15, 1.15), (0.5, 0.5)]
)
def test_the_score_is_the_median_of_bucket_means_rounded_towards_one(
    mean: float, score: float
) -> None:
    assert (
        score_of(
            [mean * 0.99, mean * 0.99, mean * 0.99, mean, mean * 1.01, mean * 1.01, mean * 1.01],
            "cudal1",
        )
        == score
    )
    assert round_towards_one(mean) == score


def test_a_mean_over_runs_would_be_moved_by_the_outlier_that_the_median_ignores() -> None:
    assert score_of([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.15], "cudal1") == 1.0


@pytest.mark.parametrize(("means", "absolute", "relative"), [
    ([1, 1, 1, 1, 1, 1, 1.25], False, False),
    ([10, 10.1, 10.2, 10, 10.1, 10.2, 10.1], False, True),
    ([0.1, 0.1, 0.1, 0.15, 0.15, 0.2, 0.2], True, False),
    ([2, 2, 2, 2, 2, 2, 2.05], True, True),
])  # fmt: skip
def test_the_variance_gate_is_absolute_for_the_paper_and_relative_in_strict(
    means: list[float], absolute: bool, relative: bool
) -> None:
    assert (not isinstance(score_of(means, "cudal1"), Unstable)) == absolute
    assert (not isinstance(score_of(means, "strict"), Unstable)) == relative


@pytest.mark.parametrize(
    "means", [[1.0] * 6, [1.0] * 6 + [0.0], [1.0] * 6 + [math.inf], [1.0] * 6 + [math.nan]]
)
def test_means_that_mean_nothing_are_refused(means: list[float]) -> None:
    with pytest.raises(ValueError, match="expected 7 finite speed-ups"):
        score_of(means, "cudal1")


def test_a_score_is_surprising_above_three_or_twice_the_best() -> None:
    assert [is_surprising(score, None) for score in (2.99, 3.0, 3.01)] == [False, False, True]
    assert [is_surprising(score, 1.0) for score in (2.0, 2.01)] == [False, True]


def test_a_failure_becomes_a_number_only_here() -> None:
    assert [compute_reward(WRONG, kind) for kind in ("speedup", "log", "milestone")] == [0, -1, -1]
    assert compute_reward(ok(2.5)) == 2.5
    assert compute_reward(ok(2.5), "log") == pytest.approx(math.log(2.5))
    assert [compute_reward(ok(score), "milestone") for score in (0.2, 1.04, 1.05, 1.99, 2.0)] == [
        1,
        1,
        2,
        2,
        3,
    ]
    with pytest.raises(ValueError, match="reward 'raw'"):
        compute_reward(WRONG, "raw")  # type: ignore[arg-type]
