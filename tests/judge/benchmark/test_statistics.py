"""What samples mean, on synthetic noise whose truth is known."""

from __future__ import annotations

import math
import random
import statistics as plain
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from torch_cudal1.core.settings import Settings
from torch_cudal1.judge.benchmark.protocol import measure
from torch_cudal1.judge.benchmark.statistics import (
    FEWEST_PAIRS,
    FEWEST_SLOW_PAIRS,
    PairedSummary,
    agree,
    compute_paper_variance,
    summarise,
)
from torch_cudal1.judge.benchmark.timing import L2, SampleBatch, WarmCosts
from torch_cudal1.judge.benchmark.timing_plan import BUCKETS, TIMING_PLANS

MARGIN = Settings().margin
Draw = random.Random
Noise = Callable[[Draw], Iterator[tuple[float, float]]]
PAIRS = 56


def pairs(
    ratio: float, noise: float, count: int = PAIRS, seed: int = 0
) -> list[tuple[float, float]]:
    draw = random.Random(seed)
    return [
        (100.0 * ratio * draw.lognormvariate(0, noise), 100.0 * draw.lognormvariate(0, noise))
        for _ in range(count)
    ]


def lognormal(draw: Draw) -> Iterator[tuple[float, float]]:
    while True:
        yield draw.lognormvariate(0, 0.05), draw.lognormvariate(0, 0.05)


def drift(draw: Draw) -> Iterator[tuple[float, float]]:
    """A GPU that warms up: 30 % slower at the end, and the side that leads a pair is always a
    little earlier.
    """
    for step in range(10_000):
        a_leads = (step + step // 2) % 2 == 0
        early, late = (1 + 0.3 * (step + part) / PAIRS for part in (0.0, 0.5))
        a, b = (early, late) if a_leads else (late, early)
        yield a * draw.lognormvariate(0, 0.02), b * draw.lognormvariate(0, 0.02)


def outliers(draw: Draw) -> Iterator[tuple[float, float]]:
    """One sample in twenty takes 2 to 50 times as long: another process had the machine."""
    while True:
        yield tuple(
            draw.lognormvariate(0, 0.02) * (draw.uniform(2, 50) if draw.random() < 0.05 else 1)
            for _ in "ab"
        )  # type: ignore[misc]


def bimodal(draw: Draw) -> Iterator[tuple[float, float]]:
    """Clocks jump between two states 25 % apart, on average every ten samples."""
    slow = False
    while True:
        sides = []
        for _ in "ab":
            slow ^= draw.random() < 0.1
            sides.append((1.25 if slow else 1.0) * draw.lognormvariate(0, 0.01))
        yield sides[0], sides[1]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Thousands of small tensors: threads would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


NOISES: dict[str, Noise] = {
    noise.__name__: noise for noise in (lognormal, drift, outliers, bimodal)
}


def trial(noise: Noise, seed: int, ratio: float = 1.0, count: int = PAIRS) -> PairedSummary:
    """One measurement of a true speed-up `ratio`."""
    return summarise(make_samples(noise, seed, ratio, count))


def make_samples(
    noise: Noise, seed: int, ratio: float = 1.0, count: int = PAIRS
) -> list[tuple[float, float]]:
    """Pairs are drawn as A B B A: a coin turns the sides of each block round."""
    draw = random.Random(seed)
    source, samples = noise(draw), []
    while len(samples) < count:
        turned = draw.random() < 0.5
        for _ in range(2):
            a, b = next(source)
            a, b = (b, a) if turned else (a, b)
            samples.append((100.0 * ratio * a, 100.0 * b))
            turned = not turned
    return samples[:count]


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.2, 3.0])
def test_the_interval_holds_the_true_ratio_and_is_tight(ratio: float) -> None:
    summary = summarise(pairs(ratio, 0.02))
    assert summary.low <= ratio * 1.01
    assert summary.high >= ratio * 0.99
    assert (summary.high - summary.low) / summary.speedup < 0.05
    assert summary.steady
    assert summary.b_us == pytest.approx(100, rel=0.02)


def test_the_interval_covers_the_truth_in_nearly_all_experiments() -> None:
    covered = sum(
        s.low <= 1.1 <= s.high
        for s in (summarise(pairs(1.1, 0.05, seed=seed)) for seed in range(100))
    )
    assert covered >= 90


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_one_kernel_against_itself_is_called_faster_in_under_one_percent_of_500_trials(
    noise: Noise,
) -> None:
    """Four kinds of noise, 2,000 trials in all; `low >= 1.05` is what a swap needs."""
    assert sum(trial(noise, seed).low >= MARGIN for seed in range(500)) < 5


@pytest.mark.parametrize(
    ("noise", "power"), [(lognormal, 0.70), (drift, 0.95), (outliers, 0.95), (bimodal, 0.95)]
)
def test_a_true_ten_percent_is_found(noise: Noise, power: float) -> None:
    """The least share of 100 trials in which a true 1.10 clears the margin of 1.05 at 56 pairs, the
    number of profile `fast`.
    """
    assert sum(trial(noise, seed, ratio=1.10).low >= MARGIN for seed in range(100)) >= 100 * power


def test_buckets_that_disagree_widen_the_interval_to_their_range() -> None:
    drifting = [(100.0 * (1 + position // 8 * 0.2), 100.0) for position in range(PAIRS)]
    summary = summarise(drifting)
    assert not summary.steady
    assert (summary.low, summary.high) == (1.0, pytest.approx(2.2))


def test_one_lucky_outlier_does_not_move_the_centre_but_moves_the_papers_mean() -> None:
    samples = pairs(1.0, 0.01)
    samples[5] = (100_000.0, 1.0)
    summary = summarise(samples)
    assert summary.speedup == pytest.approx(1.0, abs=0.02)
    assert max(summary.means) > 1_000
    assert compute_paper_variance(summary.means) > 0.005


def test_buckets_are_consecutive_blocks() -> None:
    summary = summarise([(float(1 + position // 2), 1.0) for position in range(2 * BUCKETS)])
    assert summary.values == summary.means == tuple(float(1 + bucket) for bucket in range(BUCKETS))
    assert compute_paper_variance(summary.means) == pytest.approx(plain.variance(range(BUCKETS)))


@pytest.mark.parametrize(
    "bad",
    [[(1.0, 1.0)] * 2, [(1.0, 0.0)] * 20, [(float("inf"), 1.0)] * 20, [(float("nan"), 1.0)] * 20],
)
def test_samples_that_mean_nothing_are_refused(bad: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="pairs"):
        summarise(bad)


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_looking_after_each_of_the_first_pairs_calls_one_kernel_faster_in_under_one_percent_of_500_trials(
    noise: Noise,
) -> None:
    """The rule by which a measurement of slow calls ends early, on the noise of fast ones, which is
    more.
    """
    wrong = 0
    for seed in range(500):
        samples = make_samples(noise, seed, count=FEWEST_PAIRS - 1)
        wrong += any(
            summarise(samples[:count]).low >= MARGIN
            for count in range(FEWEST_SLOW_PAIRS, FEWEST_PAIRS)
        )
    assert wrong < 5


class Noisy:
    """One kernel against itself as a `Sampler`."""

    temperatures: tuple[L2, ...] = ("hot",)

    def __init__(self, noise: Noise, seed: int) -> None:
        self.left = iter(make_samples(noise, seed, count=4 * PAIRS))

    def warm_up(self) -> tuple[WarmCosts, WarmCosts]:
        return (WarmCosts(100.0, 100.0, 100.0),) * 2

    def take_samples(self, batch: SampleBatch) -> list[tuple[float, float]]:
        return [next(self.left) for _ in range(batch.pairs)]


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_measuring_until_it_is_plain_calls_one_kernel_faster_in_under_one_percent_of_200_trials(
    noise: Noise,
) -> None:
    plan = replace(TIMING_PLANS["fast"], margin=MARGIN)
    summaries = [measure(Noisy(noise, seed), plan).summary for seed in range(200)]
    assert sum(summary.low >= MARGIN for summary in summaries) < 2
    assert min(summary.pairs for summary in summaries) == PAIRS // 2


def test_the_interval_of_a_few_pairs_is_students_and_holds_the_centre() -> None:
    summary = summarise(
        [(200.0, 100.0), (220.0, 100.0), (242.0, 100.0)]
    )  # logs one tenth of ln 2.594 apart
    half = 10.777 * math.log(1.1) / math.sqrt(3)
    assert summary.speedup == pytest.approx(2.2)
    assert summary.low == pytest.approx(2.2 * math.exp(-half))
    assert summary.high == pytest.approx(2.2 * math.exp(half))
    assert (summary.pairs, summary.steady, summary.values) == (3, False, (2.0, 2.2, 2.42))
    lopsided = summarise([(1e-150, 1e150), (1.0, 1.0), (1.0, 1.0), (1e150, 1e-150)])
    assert lopsided.low <= lopsided.speedup <= lopsided.high < math.inf


def test_the_same_samples_always_tell_the_same() -> None:
    assert summarise(pairs(1.1, 0.05)) == summarise(pairs(1.1, 0.05))


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [(4.0, 4.3, True), (4.3, 4.0, True), (4.0, 4.5, False), (1.0, 1.2, False), (50.0, 54.0, True)],
)
def test_two_measurements_agree_within_ten_percent(
    first: float, second: float, together: bool
) -> None:
    assert (
        agree(summarise(pairs(first, 0.001)), summarise(pairs(second, 0.001, seed=1))) == together
    )


def test_intervals_that_meet_agree_whatever_their_centres() -> None:
    assert agree(summarise(pairs(4.0, 0.5)), summarise(pairs(4.8, 0.5, seed=1)))
