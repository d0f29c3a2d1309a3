"""Rows as groups of tables, for Markdown and for the page alike. A group is what may share a table:
one job on one GPU.

Every group names its precision, how many of the benchmark's tasks have a row yet, and which
versions measured them. Sizes that were cut down are never called a result: `compute_headline`
refuses them, and refuses a group in which tasks are still missing.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.kernelbench.ablation import compute_products, summarise_products
from benchmarks.kernelbench.job import EAGER, OURS, Job
from benchmarks.kernelbench.statistics import (
    BEST,
    Ratio,
    Summary,
    compute_fast_p,
    compute_geomean,
    compute_ratios,
    compute_tuning_curve,
    summarise,
)

__all__ = ["Group", "Table", "compute_headline", "group_rows", "select_level"]

_ABSENT = "-"
_CURVE_S = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 1_200.0)
# of PyTorch and of the driver
_GPU_LOST = (
    *(
        "illegal memory access",
        "misaligned address",
        "launch failure",
        "illegal instruction",
        "device-side assert",
    ),
    *("CUDA_ERROR_ILLEGAL", "CUDA_ERROR_MISALIGNED", "CUDA_ERROR_LAUNCH_FAILED"),
)
_STATISTICS = (
    "mean",
    "max",
    "75 %",
    "50 %",
    "25 %",
    "success",
    "> 1.01x",
    "geometric mean",
    "clamped at 1",
)


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Rows of one job on one GPU. `total`: how many tasks the benchmark has."""

    job: Job
    sizes: str
    gpu: str
    total: int
    rows: list[Mapping[str, Any]]
    tables: list[Table] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Sizes, precision, profile and mode, which a reader must know before any number."""
        sizes = "today's sizes" if self.sizes == "today" else "the CUDA-L1 release's sizes"
        return f"KernelBench, {sizes}, {self.job.label}; profile {self.job.profile.name}, {self.job.mode} mode"

    @property
    def about(self) -> str:
        """Machine, versions and completeness in a sentence each."""
        versions = Counter(
            f"{e['version'] or e['package']}" for e in (row["environment"] for row in self.rows)
        )
        environment = self.rows[0]["environment"]
        machine = self.gpu or f"{environment['cores']} cores of {environment['cpu']}"
        incomplete = (
            ""
            if len(self.rows) >= self.total
            else f" INCOMPLETE: {self.total - len(self.rows)} tasks have no row yet."
        )
        mixed = " Measured by several versions of the package." if len(versions) > 1 else ""
        tune_s = self.job.profile.tune_s
        installed = [
            f"torch {environment['torch']}",
            f"Triton {environment['triton']}",
            f"Python {environment['python']}",
            f"package {', '.join(versions)}",
        ]
        software = ", ".join(installed)
        return f"{machine}, {software}; {len(self.rows)} of {self.total} tasks, search budget {tune_s:g} s a task.{incomplete}{mixed}"


def group_rows(rows: Iterable[Mapping[str, Any]]) -> list[Group]:
    """One group for each job, GPU and set of sizes, in the order in which they come."""
    groups_by_key: dict[str, Group] = {}
    for row in rows:
        name = str((row["job"], row["environment"]["gpu"], row["task"]["sizes"]))
        if name not in groups_by_key:
            groups_by_key[name] = Group(
                Job.from_json(row["job"]),
                row["task"]["sizes"],
                row["environment"]["gpu"],
                int(row["of"]),
                [],
            )
        groups_by_key[name].rows.append(row)
    for group in groups_by_key.values():
        group.tables.extend(_make_tables(group))
    return list(groups_by_key.values())


def compute_headline(group: Group) -> dict[str, float]:
    """Geometric means over all tasks against each baseline. Raises ValueError for a group that is
    no result.
    """
    if group.job.scale != 1:
        raise ValueError(
            f"sizes were cut down by {group.job.scale}: that is no result; measure with --scale 1"
        )
    if not group.job.ours:
        raise ValueError("the package's own column was not measured (--no-ours)")
    if len(group.rows) < group.total:
        raise ValueError(
            f"{group.total - len(group.rows)} of {group.total} tasks have no row; run again with the same --out"
        )
    means = {
        base: compute_geomean([r.speedup for r in compute_ratios(group.rows, OURS, base)])
        for base in (BEST, *group.job.baselines)
    }
    return {base: value for base, value in means.items() if value is not None}


def select_level(task_ratios: Iterable[Ratio], level: int | None) -> list[Ratio]:
    """The ratios of one level, or all."""
    return [ratio for ratio in task_ratios if level in (None, ratio.level)]


def _make_tables(group: Group) -> list[Table]:
    tables = [_compare_column(group, name) for name in group.job.contenders]
    tables += [
        _compare_baselines(group),
        _tabulate_fast_p(group),
        _compare_clocks(group),
        _compare_lower_bounds(group),
        *_tabulate_search(group),
        _list_trouble(group),
        _list_tasks(group),
    ]
    if group.job.arms:
        tables.append(_tabulate_arms(group))
    return [table for table in tables if table.rows]


def _list_levels(group: Group) -> list[int | None]:
    return [None, *sorted({int(row["task"]["level"]) for row in group.rows})]


def _compare_column(group: Group, name: str) -> Table:
    lines = []
    for base in (BEST, *group.job.baselines):
        task_ratios = compute_ratios(group.rows, name, base)
        for level in _list_levels(group):
            summary = summarise(select_level(task_ratios, level))
            label = "best of all" if base == BEST else base
            lines.append([label, "all" if level is None else str(level), *_format_summary(summary)])
    note = "A task without an answer counts as 1.0. Against one baseline, tasks for which that baseline does not run are left out."
    return Table(f"{name} against each baseline", ("baseline", "level", *_STATISTICS), lines, note)


def _format_summary(summary: Summary) -> list[str]:
    numbers = [
        _format_ratio(value)
        for value in (summary.mean, summary.most, summary.p75, summary.p50, summary.p25)
    ]
    counts = [f"{summary.success}/{summary.tasks}", f"{summary.counted}/{summary.tasks}"]
    return [*numbers, *counts, _format_ratio(summary.geomean), _format_ratio(summary.clamped)]


def _compare_baselines(group: Group) -> Table:
    lines = []
    for base in group.job.baselines:
        if base != EAGER:
            measured = [
                ratio for ratio in compute_ratios(group.rows, base, EAGER) if ratio.measured
            ]
            lines.append(
                [
                    base,
                    *(
                        _format_ratio(
                            compute_geomean([r.speedup for r in select_level(measured, level)])
                        )
                        for level in _list_levels(group)
                    ),
                ]
            )
    best = Counter(str(row["best"]) for row in group.rows if row["best"])
    wins = ", ".join(f"{name} {count}" for name, count in best.most_common())
    columns = (
        "baseline",
        *("all" if level is None else f"level {level}" for level in _list_levels(group)),
    )
    return Table(
        "Baselines against eager, geometric means where they run",
        columns,
        lines,
        f"Fastest: {wins}.",
    )


def _tabulate_fast_p(group: Group) -> Table:
    lines = []
    grid: list[str] = []
    for name in group.job.contenders:
        for level in _list_levels(group):
            points = compute_fast_p(select_level(compute_ratios(group.rows, name), level))
            grid = [f"{p:g}" for p, _ in points]
            lines.append(
                [
                    name,
                    "all" if level is None else str(level),
                    *(f"{100 * share:.0f} %" for _, share in points),
                ]
            )
    return Table(
        "fast_p against the best baseline: share of tasks that are right and more than p times as fast",
        ("", "level", *grid),
        lines,
    )


def _compare_clocks(group: Group) -> Table:
    """The best baseline's time over the contender's, separately for device and host clocks."""
    lines = []
    for name in group.job.contenders:
        cells = []
        for clock in ("device_us", "host_us"):
            pairs = [
                (
                    row["columns"].get(row["best"], {}).get(clock),
                    row["columns"].get(name, {}).get(clock),
                )
                for row in group.rows
            ]
            cells.append(
                _format_ratio(
                    compute_geomean(
                        [
                            baseline_us / contender_us
                            for baseline_us, contender_us in pairs
                            if baseline_us and contender_us
                        ]
                    )
                )
            )
        if cells != [_ABSENT, _ABSENT]:
            lines.append([name, *cells])
    note = "Each clock alone, unpaired: device time between events with a cold L2 cache, host time until the call returns."
    return Table(
        "Device and host time apart: best baseline over contender, geometric means",
        ("", "device", "host"),
        lines,
        note,
    )


def _compare_lower_bounds(group: Group) -> Table:
    """Device time over the lower bound (bytes or products), by level."""
    lines = []
    for name in (*group.job.contenders, BEST):
        for level in _list_levels(group):
            multiples = [
                _over_lower_bound(row, row["best"] if name == BEST else name)
                for row in group.rows
                if level in (None, row["task"]["level"])
            ]
            measured = [value for value in multiples if value is not None]
            if measured:
                label = "best baseline" if name == BEST else name
                lines.append(
                    [
                        label,
                        "all" if level is None else str(level),
                        str(len(measured)),
                        _format_ratio(compute_geomean(measured)),
                        _format_ratio(max(measured)),
                    ]
                )
    note = "Floor: inputs, parameters and results once at the memory's peak rate, or the products as written at the peak of TF32."
    return Table(
        "Device time over the floor",
        ("", "level", "tasks", "geometric mean", "largest"),
        lines,
        note,
    )


def _over_lower_bound(row: Mapping[str, Any], name: str | None) -> float | None:
    lower_bound_us = (row.get("demand") or {}).get("floor_us")
    device_us = row["columns"].get(name, {}).get("device_us")
    return device_us / lower_bound_us if lower_bound_us and device_us else None


def _tabulate_search(group: Group) -> list[Table]:
    """What was swapped in, and the seconds that finding it took."""
    swapped = [row for row in group.rows if row["ours"].get("swapped")]
    gains = {ratio.key: ratio.speedup for ratio in compute_ratios(group.rows, OURS)}
    gains_by_technique: dict[str, list[float]] = {}
    for row in swapped:
        for technique in row["ours"]["techniques"] or ["schedule only"]:
            gains_by_technique.setdefault(technique, []).append(gains[row["task"]["key"]])
    lines = [
        [name, str(len(values)), _format_ratio(compute_geomean(values))]
        for name, values in sorted(
            gains_by_technique.items(), key=lambda name_and_gains: -len(name_and_gains[1])
        )
    ]
    lines.append(
        [
            "any",
            str(len(swapped)),
            _format_ratio(compute_geomean([gains[row["task"]["key"]] for row in swapped])),
        ]
    )
    won = Table(
        "What was swapped in: tasks, and geometric mean of those against the best baseline",
        ("technique", "tasks", "gain"),
        lines,
    )
    spent = [
        float(row["ours"]["tune_s"]) for row in group.rows if row["ours"].get("tune_s") is not None
    ]
    if not spent:
        return []
    curve = compute_tuning_curve(group.rows, OURS)
    reached = [
        [f"{limit:g}", _format_ratio([speed for seconds, speed in curve if seconds <= limit][-1])]
        for limit in _CURVE_S
    ]
    note = f"Wall seconds of a search beside others; median {statistics.median(spent):.1f}, longest {max(spent):.1f}."
    note += _describe_waiting(group)
    return [
        won,
        Table(
            "Speed-up against the best baseline if each search had stopped after",
            ("seconds", "geometric mean"),
            reached,
            note,
        ),
    ]


def _describe_waiting(group: Group) -> str:
    """How much of the search's time is its own, from rows that record how long they waited for the
    GPU's clock and held it.
    """
    timed_rows = [
        row
        for row in group.rows
        if "held" in row.get("gpu_s", {}) and row["ours"].get("tune_s") is not None
    ]
    if not timed_rows:
        return ""
    search_s = statistics.median(
        float(row["ours"]["tune_s"]) - float(row["gpu_s"]["waited"]) for row in timed_rows
    )
    clock = statistics.median(float(row["gpu_s"]["held"]) for row in timed_rows)
    return (
        f" Without waiting for the GPU's clock median {search_s:.1f} ({len(timed_rows)} tasks that tell); that clock was held for {clock:.1f},"
        " the measuring of all columns included."
    )


def _list_trouble(group: Group) -> Table:
    """What a reader must not have to look for: regressions, failures, wrong results, fall-backs of
    the package.
    """
    lines = []
    for row in group.rows:
        key = f"{row['task']['key']} {row['task']['name']}"
        for name in group.job.contenders:
            best = row["against"].get(name, {}).get(BEST)
            if best is not None and best["speedup"] < 0.98:
                lines.append(
                    [
                        key,
                        name,
                        "slower",
                        f"{_format_ratio(best['speedup'])} [{best['low']:.3f}, {best['high']:.3f}] of {row['best']}",
                    ]
                )
        for name, column in row["columns"].items():
            if column["status"] != "ok":
                lines.append([key, name, column["status"], str(column["reason"])[:200]])
        lines += [
            [key, OURS, "fell back", reason[:200]]
            for reason in row["ours"].get("fallbacks", [])[:1]
        ]
        if lost := _list_gpu_losses(row["ours"]):
            lines.append(
                [
                    key,
                    OURS,
                    "a kernel of ours cost a judge's process its GPU",
                    lost[0].splitlines()[0][:200],
                ]
            )
    return Table(
        "Slower than 0.98x, failed, wrong, refused", ("task", "column", "what", "why"), lines
    )


def _list_gpu_losses(package_facts: Mapping[str, Any]) -> list[str]:
    """Reasons of failed candidates that cost a process its GPU: no user met them, but they are bugs
    of a kernel.
    """
    reasons = [
        str(why) for shortlist in package_facts.get("heats", []) for _, why in shortlist["failures"]
    ]
    reasons += [str(attempt["reason"]) for attempt in package_facts.get("tried", [])]
    return [why for why in reasons if any(word in why for word in _GPU_LOST)]


def _list_tasks(group: Group) -> Table:
    names = [*group.job.baselines, *group.job.contenders]
    lines = []
    for row in group.rows:
        times = [_format_us(row["columns"].get(name, {})) for name in names]
        best = row["against"].get(OURS, {}).get(BEST)
        runs = " + ".join(row["ours"].get("techniques") or row["ours"].get("runs") or [])
        speed = (
            f"{best['speedup']:.3f}x [{best['low']:.3f}, {best['high']:.3f}]" if best else _ABSENT
        )
        error = row["columns"].get(OURS, {}).get("checked", {}).get("error_ratio")
        lines.append(
            [
                f"{row['task']['key']} {row['task']['name']}",
                *times,
                speed,
                runs,
                _ABSENT if error is None else f"{error:.2f}",
            ]
        )
    columns = (
        "task",
        *(f"{name}, µs" for name in names),
        "against the best",
        "runs",
        "error / eager's",
    )
    return Table("Every task", columns, lines)


def _tabulate_arms(group: Group) -> Table:
    task_products = compute_products(group.rows)
    lines = [
        [name, _format_ratio(value)] for name, value in summarise_products(task_products).items()
    ]
    note = f"{len(task_products)} tasks with every arm, against eager. Gains multiply where together over product is 1.0."
    return Table("Techniques alone and together", ("", "geometric mean"), lines, note)


def _format_us(column: Mapping[str, Any]) -> str:
    if column.get("us") is None:
        return str(column.get("status", _ABSENT))
    return f"{column['us']:.1f}" if column["us"] < 1000 else f"{column['us']:.0f}"


def _format_ratio(value: float | None) -> str:
    return _ABSENT if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"
