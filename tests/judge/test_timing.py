"""The interval of a speed-up, on synthetic samples and on a real clock."""

from __future__ import annotations

import random
import time

import pytest
import torch

from torch_cudal1.judge.timing import interleave, sample_pairs, summarise

CPU = torch.device("cpu")


def pairs(ratio: float, noise: float, count: int = 56, seed: int = 0) -> list[tuple[float, float]]:
    draw = random.Random(seed)
    return [(100.0 * ratio * draw.lognormvariate(0, noise), 100.0 * draw.lognormvariate(0, noise)) for _ in range(count)]


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.2, 3.0])
def test_the_interval_holds_the_true_ratio_and_is_tight(ratio: float) -> None:
    summary = summarise(pairs(ratio, 0.02))
    assert summary.low <= ratio * 1.01
    assert summary.high >= ratio * 0.99
    assert (summary.high - summary.low) / summary.speedup < 0.05
    assert summary.steady
    assert summary.b_us == pytest.approx(100, rel=0.02)


def test_the_interval_covers_the_truth_in_nearly_all_experiments() -> None:
    covered = sum(s.low <= 1.1 <= s.high for s in (summarise(pairs(1.1, 0.05, seed=seed)) for seed in range(100)))
    assert covered >= 90


def test_noise_alone_does_not_win() -> None:
    assert sum(summarise(pairs(1.0, 0.1, seed=seed)).low >= 1.05 for seed in range(100)) <= 1


def test_buckets_that_disagree_widen_the_interval_to_their_range() -> None:
    drifting = [(100.0 * (1 + position // 8 * 0.2), 100.0) for position in range(56)]
    summary = summarise(drifting)
    assert not summary.steady
    assert (summary.low, summary.high) == (1.0, pytest.approx(2.2))


def test_one_lucky_outlier_does_not_move_the_centre() -> None:
    samples = pairs(1.0, 0.01)
    samples[5] = (100_000.0, 1.0)
    assert summarise(samples).speedup == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("bad", [[(1.0, 1.0)] * 6, [(1.0, 0.0)] * 20, [(float("inf"), 1.0)] * 20, [(float("nan"), 1.0)] * 20])
def test_samples_that_mean_nothing_are_refused(bad: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="pairs"):
        summarise(bad)


def test_a_real_difference_is_seen() -> None:
    summary = summarise(sample_pairs(lambda: time.sleep(2e-3), lambda: time.sleep(0.5e-3), CPU, budget_s=2.0))
    assert summary.low > 1.5
    assert 400 < summary.b_us < 2_500


def test_interleaved_samples_keep_the_order_of_speed() -> None:
    samples = interleave({"slow": lambda: time.sleep(2e-3), "quick": lambda: None}, CPU, budget_s=0.5)
    assert len(samples["slow"]) == len(samples["quick"]) >= 5
    assert min(samples["slow"]) > max(samples["quick"])
