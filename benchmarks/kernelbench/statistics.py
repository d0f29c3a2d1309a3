"""What the rows say: the statistics of the paper's tables, geometric means, fast_p, regressions.
Pure functions of rows.

No task is ever dropped. A task whose contender failed, was refused, withdrawn or answered wrongly
counts as 1.0 against every baseline; where a *baseline* does not exist for a task (a graph that
cannot be captured), the task has no ratio against that one alone, and `tasks` says how many had
one. Against "best" every task has a ratio.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = [
    "BEST",
    "REGRESSION_BELOW",
    "Ratio",
    "Summary",
    "compute_fast_p",
    "compute_geomean",
    "compute_quartiles",
    "compute_ratios",
    "compute_tuning_curve",
    "summarise",
]

Row: TypeAlias = Mapping[str, Any]

BEST = "best"
REGRESSION_BELOW = 0.98  # below this against the best baseline is a regression
COUNTED_ABOVE = 1.01  # the paper counts a speed-up above this
_FAST_P_GRID = (0.5, 0.8, 0.9, 1.0, 1.01, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True)
class Ratio:
    """Baseline time over contender time for one task. `measured` False: a failure, counted as 1.0.
    `high`: of the 95 % interval.
    """

    key: str
    level: int
    speedup: float
    high: float
    measured: bool


@dataclass(frozen=True)
class Summary:
    """A line of a table. `tasks` have a ratio; `success` of them ran and were right; `clamped`
    counts nothing below 1.0.
    """

    tasks: int
    success: int
    mean: float | None
    most: float | None
    p75: float | None
    p50: float | None
    p25: float | None
    counted: int
    geomean: float | None
    clamped: float | None
    slower: tuple[str, ...]
    slower_beyond_noise: tuple[str, ...]
    failed: tuple[str, ...]


def compute_ratios(rows: Iterable[Row], contender: str, against: str = BEST) -> list[Ratio]:
    """One ratio a task, in the rows' order; a task without that baseline has none."""
    return [ratio for row in rows if (ratio := _make_ratio(row, contender, against)) is not None]


def summarise(task_ratios: Sequence[Ratio]) -> Summary:
    """The statistics of those ratios."""
    values = [ratio.speedup for ratio in task_ratios]
    p25, p50, p75 = compute_quartiles(values)
    return Summary(
        tasks=len(task_ratios),
        success=sum(ratio.measured for ratio in task_ratios),
        mean=statistics.fmean(values) if values else None,
        most=max(values, default=None),
        p75=p75,
        p50=p50,
        p25=p25,
        counted=sum(value > COUNTED_ABOVE for value in values),
        geomean=compute_geomean(values),
        clamped=compute_geomean([max(1.0, value) for value in values]),
        slower=tuple(ratio.key for ratio in task_ratios if ratio.speedup < REGRESSION_BELOW),
        slower_beyond_noise=tuple(
            ratio.key for ratio in task_ratios if ratio.high < REGRESSION_BELOW
        ),
        failed=tuple(ratio.key for ratio in task_ratios if not ratio.measured),
    )


def compute_geomean(values: Sequence[float]) -> float | None:
    """Geometric mean; None of no values."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def compute_quartiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """25 %, 50 %, 75 %, interpolated between the values as numpy does by default."""
    if not values:
        return None, None, None
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def compute_fast_p(
    task_ratios: Sequence[Ratio], grid: Sequence[float] = _FAST_P_GRID
) -> list[tuple[float, float]]:
    """KernelBench's fast_p: the share of all tasks that are right and more than p times as fast,
    for each p.
    """
    total = max(1, len(task_ratios))
    return [
        (p, sum(ratio.measured and ratio.speedup > p for ratio in task_ratios) / total)
        for p in grid
    ]


def compute_tuning_curve(rows: Iterable[Row], contender: str) -> list[tuple[float, float]]:
    """Geometric mean against the best baseline if every search had been stopped after so many
    seconds: (seconds, speed-up) points.

    A task counts 1.0 until its own search had ended, and what it reached (not less than 1.0) from
    then on.
    """
    rows = list(rows)
    speeds = {ratio.key: max(1.0, ratio.speedup) for ratio in compute_ratios(rows, contender)}
    ended = sorted(
        (float(row["ours"]["tune_s"]), row["task"]["key"])
        for row in rows
        if row.get("ours", {}).get("tune_s") is not None
    )
    points, total = [(0.0, 1.0)], 0.0
    for seconds, key in ended:
        total += math.log(speeds.get(key, 1.0))
        points.append((seconds, math.exp(total / max(1, len(speeds)))))
    return points


def _make_ratio(row: Row, contender: str, against: str) -> Ratio | None:
    task, column = row["task"], row["columns"].get(contender)
    measured = column is not None and column["status"] == "ok"
    if measured:
        interval = row["against"].get(contender, {}).get(against)
        if interval is None:
            return None
        return Ratio(
            task["key"], task["level"], float(interval["speedup"]), float(interval["high"]), True
        )
    baseline_ran = row["columns"].get(against, {}).get("status") == "ok"
    counts_as_one = against == BEST or row["columns"].get("eager", {}).get("status") != "ok"
    return (
        Ratio(task["key"], task["level"], 1.0, 1.0, False)
        if baseline_ran or counts_as_one
        else None
    )
