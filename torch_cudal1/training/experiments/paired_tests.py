"""The statistics of an experiment: paired differences between arms with intervals, correction for
many comparisons, and rows in the format of the paper's tables.

Failures have no score, so every table names its denominator: all tasks, with a failure as 0 or as 1
(the reference runs), or the successes alone.

scipy.stats has neither of the two procedures that the committed plans name. Its `bootstrap`
resamples one axis, where seeds and tasks are crossed; `false_discovery_control` bounds the rate of
false discoveries, not the probability of one. Both are therefore implemented here, and a test
compares the bootstrap with scipy's where the two coincide, on one task.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "PairedDifference",
    "TableRow",
    "adjust_by_holm",
    "build_table_row",
    "compute_area",
    "estimate_difference",
]

BOOTSTRAP_DRAWS = 10_000
# Part of the pre-registered procedure: the published digits follow from it.
BOOTSTRAP_SEED = 20_261_120
# A speed-up is counted only above this (CUDA-L1, section 2.1).
MIN_COUNTED_SPEEDUP = 1.01


@dataclass(frozen=True)
class PairedDifference:
    """Mean over seeds and tasks of (one arm - other arm), with its 95 % interval and two-sided
    bootstrap p.
    """

    value: float
    low: float
    high: float
    p: float
    seeds: int
    tasks: int
    # of the seeds' own means; None for one seed
    seed_deviation: float | None

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes 0, which is the condition for a claim."""
        return self.low > 0 or self.high < 0


def estimate_difference(
    arm: Sequence[Sequence[float]],
    baseline_arm: Sequence[Sequence[float]],
    *,
    draws: int = BOOTSTRAP_DRAWS,
) -> PairedDifference:
    """The mean of arm - baseline_arm, both (seeds, tasks) and paired in both, by a hierarchical
    bootstrap: seeds are drawn with replacement, then tasks.

    Raises ValueError for arms that are not of one shape, or hold something that is no number.
    """
    first = torch.tensor(arm, dtype=torch.float64)
    second = torch.tensor(baseline_arm, dtype=torch.float64)
    if first.shape != second.shape or first.dim() != 2 or not first.numel():
        raise ValueError(
            "expected two arms of one shape (seeds, tasks), "
            f"got {tuple(first.shape)} and {tuple(second.shape)}"
        )
    differences = first - second
    # One NaN would make every draw NaN, and the interval would say nothing without saying so.
    if not bool(differences.isfinite().all()):
        raise ValueError(
            "expected finite numbers for every seed and task: "
            "a failure needs its fallback before it is compared"
        )
    seeds, tasks = differences.shape
    random = torch.Generator().manual_seed(BOOTSTRAP_SEED)
    seed_weights = _draw_weights(draws, seeds, random)
    # one draw of tasks for all seeds of a draw: seeds share their tasks, so drawing them apart
    # would understate the spread
    task_weights = _draw_weights(draws, tasks, random)
    # Weighted means instead of gathered samples: (draws, seeds) times (seeds, tasks) in place of a
    # tensor of draws x seeds x tasks.
    means = ((seed_weights @ differences) * task_weights).sum(1).sort().values
    # The percentile interval: the 2.5 % and 97.5 % quantiles of the sorted means.
    low, high = (float(means[round(share * (draws - 1))]) for share in (0.025, 0.975))
    # one more in both counts: the observed sample is a draw too, so p is never 0
    opposite = 1 + min(int((means <= 0).sum()), int((means >= 0).sum()))
    return PairedDifference(
        value=float(differences.mean()),
        low=low,
        high=high,
        # Two-sided: twice the smaller tail.
        p=min(1.0, 2 * opposite / (draws + 1)),
        seeds=seeds,
        tasks=tasks,
        seed_deviation=float(differences.mean(1).std()) if seeds > 1 else None,
    )


def adjust_by_holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p of a family of comparisons (Holm's step-down): the chance of one false finding
    among all of them stays below the level.
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        # Step-down: the smallest p is multiplied by their number, the next by one less, and none
        # may fall below the one before.
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


def compute_area(best_scores: Sequence[float]) -> float:
    """Area under the curve of the best score so far: the mean of its logarithm over measurements.
    Higher means sooner and better. Raises ValueError for an empty curve.
    """
    if not best_scores:
        raise ValueError("expected at least one measurement")
    return statistics.fmean(math.log(score) for score in best_scores)


@dataclass(frozen=True)
class TableRow:
    """A line of the paper's tables over `tasks` tasks, of which `success` have a score.

    mean, largest and quartiles: with failures counted as `missing`. `geomean_scored`: of the
    successes alone, None without any. `geomean`: with failures as 1 whatever `missing` is (0 would
    make it 0). `fast`: shares of all tasks that are faster than p.
    """

    name: str
    missing: float
    tasks: int
    success: int
    counted: int
    mean: float
    largest: float
    p75: float
    p50: float
    p25: float
    geomean: float
    geomean_scored: float | None
    fast: Mapping[float, float]


def build_table_row(name: str, scores: Sequence[float | None], *, missing: float) -> TableRow:
    """Summarise one score for each task, None for a failure. Raises ValueError for no task, or
    another `missing` than 0 or 1.
    """
    if not scores or missing not in (0.0, 1.0):
        raise ValueError(
            "expected scores of at least one task, and failures to count as 0 or 1; "
            f"got {len(scores)}, {missing}"
        )
    successes = [score for score in scores if score is not None]
    filled = [missing if score is None else score for score in scores]
    quantiles = torch.tensor([0.75, 0.5, 0.25], dtype=torch.float64)
    p75, p50, p25 = torch.tensor(filled, dtype=torch.float64).quantile(quantiles).tolist()
    failures = len(scores) - len(successes)
    return TableRow(
        name=name,
        missing=missing,
        tasks=len(scores),
        success=len(successes),
        counted=sum(score > MIN_COUNTED_SPEEDUP for score in successes),
        mean=statistics.fmean(filled),
        largest=max(filled),
        p75=p75,
        p50=p50,
        p25=p25,
        # A failure as 0 would make the geometric mean 0 whatever the others are.
        geomean=statistics.geometric_mean([*successes, *[1.0] * failures]),
        geomean_scored=statistics.geometric_mean(successes) if successes else None,
        fast={p: sum(score > p for score in successes) / len(scores) for p in (1.0, 1.5, 2.0)},
    )


def _draw_weights(draws: int, size: int, random: torch.Generator) -> Tensor:
    """(draws, size): how often each of `size` members was drawn in `size` draws with replacement,
    as shares.
    """
    members = torch.randint(size, (draws, size), generator=random)
    counts = torch.zeros(draws, size, dtype=torch.float64)
    return counts.scatter_add_(1, members, torch.ones_like(members, dtype=torch.float64)) / size
