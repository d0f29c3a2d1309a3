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
    "SLOWER",
    "Ratio",
    "Summary",
    "fast_p",
    "geomean",
    "quartiles",
    "ratios",
    "summarise",
    "tuning_curve",
]

Row: TypeAlias = Mapping[str, Any]

BEST = "best"
SLOWER = 0.98  # below this against the best baseline is a regression
COUNTED = 1.01  # the paper counts a speed-up above this
_CURVE = (0.5, 0.8, 0.9, 1.0, 1.01, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)


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


def ratios(rows: Iterable[Row], contender: str, against: str = BEST) -> list[Ratio]:
    """One ratio a task, in the rows' order; a task without that baseline has none."""
    return [ratio for row in rows if (ratio := _ratio(row, contender, against)) is not None]


def summarise(found: Sequence[Ratio]) -> Summary:
    """The statistics of those ratios."""
    values = [ratio.speedup for ratio in found]
    p25, p50, p75 = quartiles(values)
    return Summary(
        tasks=len(found),
        success=sum(ratio.measured for ratio in found),
        mean=statistics.fmean(values) if values else None,
        most=max(values, default=None),
        p75=p75,
        p50=p50,
        p25=p25,
        counted=sum(value > COUNTED for value in values),
        geomean=geomean(values),
        clamped=geomean([max(1.0, value) for value in values]),
        slower=tuple(ratio.key for ratio in found if ratio.speedup < SLOWER),
        slower_beyond_noise=tuple(ratio.key for ratio in found if ratio.high < SLOWER),
        failed=tuple(ratio.key for ratio in found if not ratio.measured),
    )


def geomean(values: Sequence[float]) -> float | None:
    """Geometric mean, None of nothing."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def quartiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """25 %, 50 %, 75 %, interpolated between the values as numpy does by default."""
    if not values:
        return None, None, None
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def fast_p(found: Sequence[Ratio], grid: Sequence[float] = _CURVE) -> list[tuple[float, float]]:
    """KernelBench's fast_p: the share of all tasks that are right and more than p times as fast,
    for each p.
    """
    total = max(1, len(found))
    return [(p, sum(ratio.measured and ratio.speedup > p for ratio in found) / total) for p in grid]


def tuning_curve(rows: Iterable[Row], contender: str) -> list[tuple[float, float]]:
    """Geometric mean against the best baseline if every search had been stopped after so many
    seconds: (seconds, speed-up) points.

    A task counts 1.0 until its own search had ended, and what it reached (not less than 1.0) from
    then on.
    """
    rows = list(rows)
    speeds = {ratio.key: max(1.0, ratio.speedup) for ratio in ratios(rows, contender)}
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


def _ratio(row: Row, contender: str, against: str) -> Ratio | None:
    task, column = row["task"], row["columns"].get(contender)
    measured = column is not None and column["status"] == "ok"
    if measured:
        found = row["against"].get(contender, {}).get(against)
        if found is None:
            return None
        return Ratio(
            task["key"], task["level"], float(found["speedup"]), float(found["high"]), True
        )
    ran = row["columns"].get(against, {}).get("status") == "ok"
    lost = against == BEST or row["columns"].get("eager", {}).get("status") != "ok"
    return Ratio(task["key"], task["level"], 1.0, 1.0, False) if ran or lost else None
