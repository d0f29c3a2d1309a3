"""What an experiment says: paired differences between arms with intervals, tests of many, and
tables in the paper's format.

Failures have no score, so every table names its denominator: all tasks, a failure counting as 0 or
as 1 (the reference runs), or the successes alone. Only the standard library and torch; nothing is
drawn or printed here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Difference", "TableRow", "auc", "holm", "paired_difference", "table_row"]

DRAWS = 10_000
COUNTED = 1.01  # a speed-up is counted only above this (CUDA-L1, section 2.1)


@dataclass(frozen=True)
class Difference:
    """Mean over seeds and tasks of (one arm - other arm), with its 95 % interval and two-sided
    bootstrap p.
    """

    value: float
    low: float
    high: float
    p: float
    seeds: int
    tasks: int
    seed_deviation: float | None  # of the seeds' own means; None for one seed

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval leaves a claim."""
        return self.low > 0 or self.high < 0


def paired_difference(
    one: Sequence[Sequence[float]], other: Sequence[Sequence[float]], *, draws: int = DRAWS
) -> Difference:
    """Both (seeds, tasks), paired in both. Hierarchical bootstrap: seeds are drawn with
    replacement, then tasks.

    The tasks of a draw are the same for all its seeds: seeds share their tasks, so drawing them
    apart would understate the spread. Raises ValueError for arms that are not of one shape, or hold
    something that is no number.
    """
    first, second = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    if first.shape != second.shape or first.dim() != 2 or not first.numel():
        raise ValueError(
            f"expected two arms of one shape (seeds, tasks), got {tuple(first.shape)} and {tuple(second.shape)}"
        )
    apart = first - second
    if not bool(apart.isfinite().all()):
        raise ValueError(
            "expected finite numbers for every seed and task: a failure needs its fallback before it is compared"
        )
    seeds, tasks = apart.shape
    random = torch.Generator().manual_seed(20_261_120)
    means = ((_weights(draws, seeds, random) @ apart) * _weights(draws, tasks, random)).sum(1)
    ordered = means.sort().values
    low, high = (float(ordered[round(share * (draws - 1))]) for share in (0.025, 0.975))
    tail = 1 + min(int((means <= 0).sum()), int((means >= 0).sum()))
    spread = float(apart.mean(1).std()) if seeds > 1 else None
    return Difference(
        float(apart.mean()), low, high, min(1.0, 2 * tail / (draws + 1)), seeds, tasks, spread
    )


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p of a family of comparisons (Holm): the chance of one false finding among all of
    them stays below the level.
    """
    adjusted: dict[str, float] = {}
    floor = 0.0
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        floor = max(floor, min(1.0, (len(p) - rank) * value))
        adjusted[name] = floor
    return {name: adjusted[name] for name in p}


def auc(best: Sequence[float]) -> float:
    """Mean over measurements of the logarithm of the best so far: higher is sooner and better.
    Raises ValueError for none.
    """
    if not best:
        raise ValueError("expected at least one measurement")
    return statistics.fmean(math.log(value) for value in best)


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


def table_row(name: str, scores: Sequence[float | None], *, missing: float) -> TableRow:
    """Summarise one score a task, None for a failure. Raises ValueError for no task, or another
    `missing` than 0 or 1.
    """
    if not scores or missing not in (0.0, 1.0):
        raise ValueError(
            f"expected scores of at least one task, and failures to count as 0 or 1; got {len(scores)}, {missing}"
        )
    known = [score for score in scores if score is not None]
    filled = [missing if score is None else score for score in scores]
    p75, p50, p25 = (
        float(torch.tensor(filled, dtype=torch.float64).quantile(q)) for q in (0.75, 0.5, 0.25)
    )
    return TableRow(
        name=name,
        missing=missing,
        tasks=len(scores),
        success=len(known),
        counted=sum(score > COUNTED for score in known),
        mean=statistics.fmean(filled),
        largest=max(filled),
        p75=p75,
        p50=p50,
        p25=p25,
        geomean=statistics.geometric_mean([*known, *[1.0] * (len(scores) - len(known))]),
        geomean_scored=statistics.geometric_mean(known) if known else None,
        fast={p: sum(score > p for score in known) / len(scores) for p in (1.0, 1.5, 2.0)},
    )


def _weights(draws: int, size: int, random: torch.Generator) -> Tensor:
    """(draws, size): how often each of `size` was drawn in `size` draws with replacement, as
    shares.
    """
    drawn = torch.randint(size, (draws, size), generator=random)
    ones = torch.ones(draws, size, dtype=torch.float64)
    return torch.zeros(draws, size, dtype=torch.float64).scatter_add_(1, drawn, ones) / size
