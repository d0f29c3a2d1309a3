"""What samples mean: the centre and interval of a speed-up, whether its buckets agree, whether two
measurements do.

Pure functions of numbers: no clock, no device. Rounding and scores are
`judge.benchmark.quoted_speedup`'s.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from torch_cudal1.judge.benchmark.timing_plan import BUCKETS

__all__ = [
    "FEWEST_PAIRS",
    "FEWEST_SLOW_PAIRS",
    "MAX_SPEEDUP_GAP",
    "PairedSummary",
    "agree",
    "compute_paper_variance",
    "summarise",
]

# one a bucket: the range of the seven is then a distribution-free 98.4 % interval of the median
FEWEST_PAIRS = BUCKETS
FEWEST_SLOW_PAIRS = 3  # of a measurement that ended before, see `summarise`
# Student's t for 3, 4, 5 and 6 pairs at 0.85 % on both sides together: a caller that looks after
# each of them and ends as soon as the interval says enough errs in 3.4 % of all measurements, and
# the range of seven in the other 1.6 % of the 5.
_QUANTILES = {3: 10.777, 4: 6.188, 5: 4.824, 6: 4.199}
_DRAWS = 10_000  # of the bootstrap
_STEADY_SPREAD = 0.02  # MAD over median of the bucket values
_STEADY_VARIANCE = 0.005  # of the log bucket values
_MOST_LOG = 700.0  # exp of more is no float
# CUDA-L1 paper, section 2.4.2: measurements of a surprising speed-up may differ by 10 %.
MAX_SPEEDUP_GAP = 0.10


@dataclass(frozen=True)
class PairedSummary:
    """Speed-up of b over a (time of a / time of b): centre and 95 % interval, and the median times
    of both.

    `steady`: the seven buckets agree (MAD/median <= 2 %, variance of logs <= 0.005). When they do
    not, the interval is the range of the buckets; a few slow pairs are each a bucket. `values`: the
    buckets' median ratios, in order of time; `means`: their mean ratios, for the paper's rule.
    """

    speedup: float
    low: float
    high: float
    a_us: float
    b_us: float
    pairs: int
    steady: bool
    values: tuple[float, ...]
    means: tuple[float, ...]


def summarise(pairs: Sequence[tuple[float, float]]) -> PairedSummary:
    """The speed-up a/b and its 95 % interval: hierarchical bootstrap over seven consecutive buckets
    and the pairs in them.

    Of 3 to 6 pairs, of calls so slow that a measurement may end with them, the interval is
    Student's of the logarithms of their ratios, wide enough for looking after each. Raises
    ValueError for fewer pairs or a time that is not positive.
    """
    if len(pairs) < FEWEST_SLOW_PAIRS or any(
        not (0 < value < math.inf) for pair in pairs for value in pair
    ):
        raise ValueError(
            f"expected at least {FEWEST_SLOW_PAIRS} pairs of positive times, came {len(pairs)}"
        )
    if len(pairs) < FEWEST_PAIRS:
        return _summarise_few(pairs)
    size = len(pairs) // BUCKETS
    # Pairs that do not fill a bucket are left out, so that all buckets weigh the same.
    ratios = torch.tensor([a / b for a, b in pairs[: size * BUCKETS]], dtype=torch.float64).reshape(
        BUCKETS, size
    )
    values = _compute_median(ratios)
    # The median of seven: one disturbed bucket does not move it.
    centre = float(values.median())
    low, high = _bootstrap(ratios)
    steady = _is_steady(values)
    least, most = float(values.min()), float(values.max())
    # Buckets that disagree, or whose range is more than twice the bootstrap's interval, show a
    # drift between buckets that a bootstrap of so few hardly sees.
    if not steady or most - least > 2 * (
        high - low
    ):  # the range of 7 buckets holds the median with 98.4 %, whatever they follow
        low, high = least, most
    a_us, b_us = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    means = tuple(ratios.mean(dim=-1).tolist())
    return PairedSummary(
        centre,
        # Quantiles of resampled medians need not hold the median itself.
        min(low, centre),
        max(high, centre),
        a_us,
        b_us,
        len(pairs),
        steady,
        tuple(values.tolist()),
        means,
    )


def _summarise_few(pairs: Sequence[tuple[float, float]]) -> PairedSummary:
    """Each pair is a bucket of its own."""
    ratios = tuple(a / b for a, b in pairs)
    # Logarithms, so that a/b and b/a have the same interval.
    logs = [math.log(ratio) for ratio in ratios]
    half = _QUANTILES[len(pairs)] * statistics.stdev(logs) / math.sqrt(len(pairs))
    low, high = (math.exp(min(statistics.fmean(logs) + side * half, _MOST_LOG)) for side in (-1, 1))
    centre = statistics.median(ratios)
    a_us, b_us = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    steady = _is_steady(torch.tensor(ratios, dtype=torch.float64))
    return PairedSummary(
        centre, min(low, centre), max(high, centre), a_us, b_us, len(pairs), steady, ratios, ratios
    )


def agree(first: PairedSummary, second: PairedSummary) -> bool:
    """Whether two measurements of one speed-up may be the same: centres within 10 % of the lower
    one, or intervals that overlap.
    """
    lower, higher = sorted((first, second), key=lambda summary: summary.speedup)
    # Intervals that overlap allow one speed-up even where noise has the centres 10 % apart.
    return higher.speedup <= lower.speedup * (1 + MAX_SPEEDUP_GAP) or higher.low <= lower.high


def compute_paper_variance(means: Sequence[float]) -> float:
    """Variance (n - 1) of the seven bucket means: CUDA-L1 discards a measurement above 0.005. The
    paper leaves the divisor open.
    """
    return statistics.variance(means)


def _compute_median(ratios: torch.Tensor) -> torch.Tensor:
    """The median over the last dimension, the mean of both middle values for an even count."""
    ordered, size = ratios.sort(dim=-1).values, ratios.shape[-1]
    return (ordered[..., (size - 1) // 2] + ordered[..., size // 2]) / 2


def _bootstrap(ratios: torch.Tensor) -> tuple[float, float]:
    buckets, lower, upper = _draw_resamples(ratios.shape[1])
    ordered = ratios.sort(dim=-1).values
    centres = ((ordered[buckets, lower] + ordered[buckets, upper]) / 2).median(dim=-1).values
    return float(centres.quantile(0.025)), float(centres.quantile(0.975))


@cache
def _draw_resamples(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each draw seven buckets, and the ranks of both middle pairs among `size` pairs drawn anew
    in each.

    The k-th of n uniform numbers in order follows Beta(k, n - k + 1), and the next one is the least
    of n - k above it; so no pair need be drawn, however many there are. Ranks do not depend on the
    samples: the same samples always give the same interval.
    """
    # A fixed seed: the same samples have the same interval in every process.
    generator = torch.Generator().manual_seed(0)
    middle = (size - 1) // 2 + 1
    shapes = torch.tensor([float(middle), float(size - middle + 1)], dtype=torch.float64).expand(
        _DRAWS, BUCKETS, 2
    )
    # Beta as a ratio of gammas: `torch.distributions` takes no generator, and the user's must not
    # move.
    gammas = torch._standard_gamma(shapes, generator=generator)
    first = gammas[..., 0] / gammas.sum(dim=-1)
    second = first
    # The two middle ranks of an even count. The next of uniform numbers above the k-th is the least
    # of n - k.
    if size % 2 == 0:
        least = torch.rand((_DRAWS, BUCKETS), generator=generator, dtype=torch.float64) ** (
            1 / (size - middle)
        )
        second = 1 - (1 - first) * least
    buckets = torch.randint(BUCKETS, (_DRAWS, BUCKETS), generator=generator)
    # A uniform number that rounds to 1.0 would be a rank past the last.
    lower, upper = ((value * size).long().clamp(max=size - 1) for value in (first, second))
    return buckets, lower, upper


def _is_steady(values: torch.Tensor) -> bool:
    # The median deviation ignores one wild bucket, the variance does not: both must be small.
    median = values.median()
    spread = float((values - median).abs().median() / median)
    return spread <= _STEADY_SPREAD and float(values.log().var()) <= _STEADY_VARIANCE
