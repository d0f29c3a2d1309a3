from __future__ import annotations

import math
import random

import pytest

from torch_cudal1.training.smoothing import Moments, Smoothing, smooth_rewards, standardize_group

HACKED = [0, 0, 0, 0, 1, 1.2, 1.5, 50]


def pool(mean: float, deviation: float, count: int = 10_000) -> Moments:
    return Moments(count, mean, deviation**2 * (count - 1))


def smooth_group(group: list[float], how: Smoothing, moments: Moments) -> list[float]:
    return smooth_rewards([group], how, moments)[0][0]


def test_a_lone_winner_keeps_its_advantage_with_and_without_smoothing() -> None:
    group = [0.0] * 7 + [50.0]
    expected = 7 / math.sqrt(8)
    assert standardize_group(group)[-1] == pytest.approx(expected, rel=1e-3)
    for pool_name in ("running", "batch", "group"):
        how = Smoothing(pool_name)
        assert standardize_group(smooth_group(group, how, pool(1, 0.5)), how)[-1] == pytest.approx(
            expected, rel=1e-3
        )


def test_the_clip_acts_where_three_values_differ_and_the_pool_is_wider_than_the_group() -> None:
    plain = standardize_group(HACKED)
    acted = standardize_group(smooth_group(HACKED, Smoothing("running"), pool(1, 0.5)))
    assert plain[4] < 0 < acted[4]
    assert 0.3 < acted[4] < acted[5] < acted[6] < 1.2
    assert plain[-1] == pytest.approx(2.47, abs=0.01)
    assert acted[-1] == pytest.approx(1.49, abs=0.02)


def test_with_the_group_as_its_own_pool_the_honest_winners_stay_below_zero() -> None:
    assert standardize_group(smooth_group(HACKED, Smoothing("group"), Moments()))[4] < 0


def test_affine_maps_of_the_rewards_change_no_advantage() -> None:
    rewards = [random.Random(1).uniform(0, 3) for _ in range(8)]
    moved = [3 + 2 * reward for reward in rewards]
    assert standardize_group(moved) == pytest.approx(standardize_group(rewards), rel=1e-3)
    for pool_name in ("batch", "group"):
        how = Smoothing(pool_name)
        assert smooth_group(moved, how, Moments()) == pytest.approx(
            smooth_group(rewards, how, Moments()), rel=1e-6
        )


def test_advantages_are_bounded_only_when_asked_for() -> None:
    group = [0.0] * 7 + [50.0]
    assert max(standardize_group(group, Smoothing(clip_advantage=1.0))) == 1.0
    assert max(standardize_group(group, Smoothing())) > 2


def test_the_running_pool_remembers_and_the_batch_pool_does_not() -> None:
    _, moments = smooth_rewards([[1.0, 2.0, 3.0]], Smoothing(), Moments())
    assert moments.count == 3
    running = smooth_group([10.0, 11.0], Smoothing("running"), moments)
    batch = smooth_group([10.0, 11.0], Smoothing("batch"), moments)
    assert running != batch
    assert sum(batch) == pytest.approx(0)


def test_moments_are_those_of_the_textbook() -> None:
    import statistics

    rewards = [random.Random(2).gauss(5, 2) for _ in range(500)]
    moments = Moments().with_rewards(rewards[:200]).with_rewards(rewards[200:])
    assert moments.mean == pytest.approx(statistics.fmean(rewards))
    assert moments.deviation == pytest.approx(statistics.stdev(rewards))


def test_a_pool_without_spread_distinguishes_nothing() -> None:
    assert smooth_group([0.0, 0.0], Smoothing("group"), Moments()) == [0.0, 0.0]
    assert standardize_group([1.0]) == [0.0]


def test_without_a_clip_rewards_stay_as_they_are() -> None:
    assert smooth_group(HACKED, Smoothing(clip=None), Moments()) == HACKED


def test_nonsense_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="pool 'world'; expected one of"):
        Smoothing("world")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip is -1"):
        Smoothing(clip=-1)
