"""Shows an experiment, or a single run, as tables for a screen and sections of a page; the figures
are those of `comparison`.

Every table names its denominator and every figure whether its numbers are replay or live. Plots
need matplotlib; without it the page says so and keeps its tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch_cudal1.cli.view import plots
from torch_cudal1.cli.view.article import Figure, Section, Table, article
from torch_cudal1.cli.view.text import ABSENT, count_text
from torch_cudal1.training.experiments.comparison import (
    ArmSummary,
    compare_arms,
    compare_exemplar_effects,
    compare_stages,
    compute_optimum_means,
    summarize_arms,
    tabulate_stages,
)
from torch_cudal1.training.experiments.paired_tests import PairedDifference, TableRow
from torch_cudal1.training.experiments.plan import ARMS, ExperimentPlan
from torch_cudal1.training.experiments.policy_eval import compute_best_curves

__all__ = [
    "build_collect_table",
    "build_paper_table",
    "build_run_sections",
    "build_tables",
    "render_experiment_page",
]

Results = Sequence[Mapping[str, Any]]
# 8 seeds detect a difference of about 0.10 in log speed-up at 80 % power (deviation 0.10 to 0.16).
_MIN_SEEDS = 8
Cheats = Mapping[str, Sequence[Mapping[str, float]]]
# The columns of the paper's tables, and the geometric mean: means there are carried by single
# outliers.
_PAPER = ("mean", "max", "p75", "p50", "p25", "geomean", "success", "> 1.01x")


def render_experiment_page(
    plan: ExperimentPlan,
    results: Results,
    facts: Mapping[str, str],
    *,
    cheats: Cheats | None = None,
) -> str:
    """The whole page as text."""
    # All labels: a page must not show replay and live results as if they were of one kind.
    label = "; ".join(sorted({str(result["label"]) for result in results})) or "no results"
    size = f"{count_text(len({result['seed'] for result in results}), 'seed')}, {count_text(len(results), 'run')}"
    intro = f"{plan.endpoint} Numbers: {label}. {size}, plan {plan.digest}."
    stages = Section("Stages", [*build_tables(plan, results), *_build_figures(results)])
    sections = [stages, Section("What may be said", _build_comparison_tables(plan, results))]
    if cheats:
        sections.append(Section("Cheats", _build_cheat_section(cheats)))
    return article(f"Training: {plan.name}", intro, [*sections, _build_notes()], facts)


def build_tables(plan: ExperimentPlan, results: Results) -> list[Table]:
    """Build the tables that a terminal shows too: stages in the paper's format with both
    denominators, arms, and collected samples.
    """
    rows = tabulate_stages(results)
    tables = [
        build_paper_table(
            [pair[0] for pair in rows],
            "Best of a task's exam samples; tasks x seeds; a failure counts as 0, as in the paper",
        ),
        build_paper_table(
            [pair[1] for pair in rows], "The same; a failure counts as 1, since the reference runs"
        ),
        *_build_arm_tables(plan, results),
    ]
    stages = [result["stages"] for result in results[:1]]
    return (
        [*tables, *(build_collect_table(base_facts["collected"]) for base_facts in stages)]
        if results
        else []
    )


def build_paper_table(rows: Sequence[TableRow], caption: str) -> Table:
    """A table in the columns of the paper, with the geometric mean (failures count as 1)."""
    cells = [
        [
            r.name,
            *(f"{v:.2f}" for v in (r.mean, r.largest, r.p75, r.p50, r.p25, r.geomean)),
            f"{r.success}/{r.tasks}",
            str(r.counted),
        ]
        for r in rows
    ]
    return Table(caption, ("stage", *_PAPER), cells)


def build_collect_table(collected: Mapping[str, Mapping[str, int]]) -> Table:
    """Attempts of each generator, by outcome."""
    outcomes = ("ok", "wrong", "compile", "run", "hack", "unstable", "undecodable")
    rows = [
        [name, str(counts["attempts"]), *(str(counts.get(outcome, 0)) for outcome in outcomes)]
        for name, counts in collected.items()
    ]
    return Table(
        "Stage 1, samples collected (first seed)", ("generator", "attempts", *outcomes), rows
    )


def build_run_sections(curve: Sequence[Mapping[str, float]], label: str) -> list[Section]:
    """Sections about a single run of stage 3, step by step."""
    if not curve:
        return []
    # Ten points at most, the first and the last included: the plots have them all.
    picked = (
        [curve[round(i * (len(curve) - 1) / 9)] for i in range(10)]
        if len(curve) > 10
        else list(curve)
    )
    columns = ("step", "programs", "success", "speedup", "best", "hack", "undecodable")
    rows = [
        [
            f"{point[name]:.0f}" if name in ("step", "programs") else f"{point[name]:.3f}"
            for name in columns
        ]
        for point in picked
    ]
    parts: list[str | Table | Figure] = [Table(f"Stage 3, {label}", columns, rows)]
    # matplotlib is in the extra `report`. Without it the page keeps its tables and says what is
    # missing.
    able, reason = plots.available()
    if not able:
        return [Section("Run", [f"No plots on this page: {reason}.", *parts])]
    steps = [point["step"] for point in curve]
    shares = [
        plots.Curve(name, steps, [point[name] for point in curve])
        for name in ("success", "hack", "undecodable")
    ]
    reward = [plots.Curve("mean of all samples", steps, [point["speedup"] for point in curve])]
    best = [
        plots.Curve(
            "best so far",
            [point["programs"] for point in curve],
            [point["best"] for point in curve],
        )
    ]
    parts += [
        _draw_figure(
            reward, f"Mean speed-up of a sample, failures 0 ({label})", "step", "speed-up", "reward"
        ),
        _draw_figure(shares, f"Shares of samples ({label})", "step", "share", "shares"),
        _draw_figure(
            best,
            f"Geometric mean over tasks of the best so far ({label})",
            "different programs",
            "speed-up",
            "best",
        ),
    ]
    return [Section("Run", parts)]


def _build_arm_tables(plan: ExperimentPlan, results: Results) -> list[Table]:
    """Build the results of the arms on training tasks and on held-out tasks. Two tables, so that
    both fit on a page.
    """
    arm_summaries = summarize_arms(results, plan)
    exam_table = Table(
        "Arms: exam on training tasks",
        ("arm", "seeds", "success", "mean", "log mean"),
        [
            [
                f"{summary.arm} {summary.title}",
                str(summary.seeds),
                f"{summary.success:.3f}",
                f"{summary.speedup:.3f}",
                _format_optional(summary.log_speedup, "+.3f"),
            ]
            for summary in arm_summaries
        ],
    )
    # A plan may have no held-out tasks.
    if not arm_summaries or not arm_summaries[0].best:
        return [exam_table]
    return [exam_table, _build_held_out_table(plan, results, arm_summaries)]


def _build_held_out_table(
    plan: ExperimentPlan, results: Results, arm_summaries: Sequence[ArmSummary]
) -> Table:
    names, kinds = list(arm_summaries[0].best), list(arm_summaries[0].reached)
    rows = [
        [
            summary.arm,
            *(f"{summary.best[name]:.3f}" for name in names),
            *(f"{summary.reached[kind]:.2f}" for kind in kinds),
            # How many different programs an arm wrote: after three rounds of self-supervision and
            # 120 steps policies wrote 2.3 to 2.5 for a held-out task, so that their best of 64 was
            # the best of two.
            _format_optional(summary.programs, ".1f"),
            _format_optional(summary.deviation, ".3f"),
        ]
        for summary in arm_summaries
    ]
    # The ceiling stands below the arms: in a closed set, trying every program reaches it.
    if optimum_means := compute_optimum_means(results):
        best = [f"{optimum_means[name.split()[0]]:.3f}" for name in names]
        # No share, number of programs or deviation belongs to the ceiling.
        rows.append(["best", *best, *["1.00"] * len(kinds), ABSENT, ABSENT])
    caption = (
        "Held-out tasks: geometric mean of the best after so many programs, failures 1, and of the "
        "best there is; share of tasks that came within 5 % of that; different programs a task, of "
        f"{plan.held_out.measurements} at most: an arm that wrote few has no more to choose from"
    )
    columns = (
        "arm",
        *names,
        *(f"within 5 %, {kind}" for kind in kinds),
        "programs",
        "sd over seeds",
    )
    return Table(caption, columns, rows)


def _format_optional(value: float | None, spec: str) -> str:
    return ABSENT if value is None else format(value, spec)


def _build_comparison_tables(plan: ExperimentPlan, results: Results) -> list[str | Table | Figure]:
    comparisons = compare_arms(results, plan)
    rows = [
        [
            f"{comparison.one} - {comparison.other}, held-out {comparison.kind}"
            + (" (primary)" if comparison.primary else ""),
            *_format_interval(comparison.difference),
            f"{comparison.adjusted:.3f}",
            comparison.says,
        ]
        for comparison in comparisons
    ]
    last = max(plan.held_out.reported)
    parts: list[str | Table | Figure] = [
        Table(
            f"Log speed-up after {last} programs, paired; 95 % intervals",
            ("comparison", *_COLUMNS, "p, adjusted", "says"),
            rows,
        )
    ]
    further_differences = {**compare_stages(results), **compare_exemplar_effects(results, plan)}
    if further_differences:
        rows = [
            [name, *_format_interval(difference), "yes" if difference.excludes_zero else "no"]
            for name, difference in further_differences.items()
        ]
        parts.append(
            Table(
                "Further differences, without correction",
                ("difference", *_COLUMNS, "excludes 0"),
                rows,
            )
        )
    seeds = len({result["seed"] for result in results})
    # Before the table, not after it: an interval over two seeds looks as exact as any other.
    if seeds < _MIN_SEEDS:
        warning = (
            f"{count_text(seeds, 'seed')}: intervals over so few say little, whatever they say. "
            f"An experiment has at least {_MIN_SEEDS}."
        )
        parts.insert(0, warning)
    return parts


_COLUMNS = ("mean", "95 % interval", "seeds x tasks")


def _format_interval(d: PairedDifference) -> tuple[str, str, str]:
    return f"{d.value:+.3f}", f"[{d.low:+.3f}, {d.high:+.3f}]", f"{d.seeds} x {d.tasks}"


def _build_figures(results: Results) -> list[str | Figure]:
    able, reason = plots.available()
    if not able:
        return [f"No plots on this page: {reason}."]
    curves: dict[str, list[plots.Curve]] = defaultdict(list)
    for arm in ARMS:
        arm_results = [result for result in results if result["arm"] == arm]
        if arm_results:
            for name, curve in _average_arm(arm, arm_results).items():
                curves[name].append(curve)
    # All results of a plan have the same tasks, so those of the first stand for all.
    for kind in results[0]["kinds"] if results else ():
        for arm, points in _get_held_out_points(results, kind).items():
            curves[kind].append(_average_over_seeds(arm, points, "programs", "best"))
    for kind, value in compute_optimum_means(results).items():
        if places := [x for curve in curves[kind] for x in curve.x]:
            ends = [min(places), max(places)]
            curves[kind].append(plots.Curve("the best there is", ends, [value, value]))
    return [_build_figure(name, lines) for name, lines in curves.items() if lines]


def _average_arm(arm: str, results: Results) -> dict[str, plots.Curve]:
    """An arm's curves over training, by name of the figure."""
    step_curves = [result["curve"] for result in results]
    names = ["speedup", "success"]
    # Arms that do not learn have no log of entropy.
    if all("entropy" in point for curve in step_curves for point in curve):
        names.append("entropy")
    curves = {name: _average_over_seeds(arm, step_curves, "step", name) for name in names}
    return {**curves, "train": _average_over_seeds(arm, step_curves, "programs", "best")}


def _get_held_out_points(results: Results, kind: str) -> dict[str, list[list[dict[str, float]]]]:
    """By arm, the curve of each seed on held-out tasks of a kind; {} where there is no such task."""
    points: dict[str, list[list[dict[str, float]]]] = {arm: [] for arm in ARMS}
    best_curves = compute_best_curves(results, kind)
    for result, best_curve in zip(results, best_curves, strict=True):
        if result["kinds"].get(kind):
            points[result["arm"]].append(
                [{"programs": float(i + 1), "best": best} for i, best in enumerate(best_curve)]
            )
    return {arm: curves for arm, curves in points.items() if curves}


def _build_figure(name: str, lines: Sequence[plots.Curve]) -> Figure:
    by_step = {
        "speedup": ("Mean speed-up of a training sample, failures 0", "speed-up"),
        "success": ("Share of training samples that succeed", "share"),
        "entropy": ("Entropy of the policy, arms that learn", "nats a token"),
    }
    if name in by_step:
        return _draw_figure(lines, by_step[name][0], "step", by_step[name][1], name)
    where = "training tasks" if name == "train" else f"held-out tasks ({name})"
    return _draw_figure(
        lines, f"Geometric mean of the best so far, {where}", "different programs", "speed-up", name
    )


def _average_over_seeds(
    name: str, curves: Sequence[Sequence[Mapping[str, float]]], x: str, y: str
) -> plots.Curve:
    """Mean over seeds and their range, up to the end of the shortest curve."""
    # Beyond the shortest the mean would be over fewer seeds, and would jump where a seed ends.
    length = min(map(len, curves))
    values = [[curve[i][y] for curve in curves] for i in range(length)]
    # At the same step seeds have different numbers of programs, so places are averaged too.
    places = [sum(curve[i][x] for curve in curves) / len(curves) for i in range(length)]
    low, high = (
        # The range, not an interval: intervals over seeds and tasks are in the tables.
        ([min(v) for v in values], [max(v) for v in values]) if len(curves) > 1 else ([], [])
    )
    # A legend has room for the name, not for what stands in parentheses after it.
    title = ARMS[name].title.partition(" (")[0]
    return plots.Curve(f"{name} {title}", places, [sum(v) / len(v) for v in values], low, high)


def _build_cheat_section(cheats: Cheats) -> list[str | Table | Figure]:
    rows = [
        [
            name,
            *(f"{lines[i]['cheats']:.2f}" for i in (0, len(lines) // 2, -1)),
            f"{lines[-1]['believed']:.2f}",
            f"{lines[-1]['reported']:.2f}",
        ]
        for name, lines in cheats.items()
    ]
    columns = (
        "evaluator",
        "cheats, first step",
        "middle",
        "last",
        "believed, last",
        "speed-up it reports, last",
    )
    parts: list[str | Table | Figure] = [
        "The same weights trained by an evaluator that compares roughly and trusts the program's own "
        "process, and by the judge.",
        Table("Share of samples that are cheats", columns, rows),
    ]
    if plots.available()[0]:
        lines = [
            plots.Curve(name, [p["step"] for p in points], [p["cheats"] for p in points])
            for name, points in cheats.items()
        ]
        parts.append(
            _draw_figure(lines, "Share of samples that are cheats", "step", "share", "cheats")
        )
    return parts


def _draw_figure(lines: Sequence[plots.Curve], caption: str, x: str, y: str, salt: str) -> Figure:
    return Figure(
        caption,
        plots.plot_curves(
            lines, label=f"{caption}; the numbers are in the tables", x=x, y=y, salt=salt
        ),
    )


def _build_notes() -> Section:
    return Section(
        "How to read this",
        [
            "A speed-up is the time of the reference, run eagerly, over the program's. Replay: the score comes from a file of "
            "measurements of that machine, drawn anew from its buckets; live: it was measured for this run.",
            "Bands in the plots are the range over seeds, not intervals. What is claimed are the intervals of the tables, over "
            "seeds and tasks; a difference is claimed only where its interval leaves out 0.",
            "A closed set of programs can be searched completely: nothing here beats trying them all. What is shown is how soon a "
            "policy finds good ones, and on tasks that it was not trained on.",
        ],
    )
