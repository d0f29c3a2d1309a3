"""An experiment, or a single run, as tables for a screen and sections of a page; it computes
nothing that `comparison` does not.

Every table names its denominator and every figure whether its numbers are replay or live. Plots
need matplotlib; without it the page says so and keeps its tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch_cudal1.cli.view import plots
from torch_cudal1.cli.view.article import Figure, Section, Table, article
from torch_cudal1.cli.view.text import ABSENT, counted
from torch_cudal1.training.experiments.comparison import (
    ceilings,
    comparisons,
    crossed,
    stage_rise,
    stage_tables,
    summaries,
)
from torch_cudal1.training.experiments.exam import best_curves
from torch_cudal1.training.experiments.paired_tests import Difference, TableRow
from torch_cudal1.training.experiments.plan import ARMS, Plan

__all__ = ["collected_table", "experiment_page", "paper_table", "run_sections", "tables_of"]

Results = Sequence[Mapping[str, Any]]
Cheats = Mapping[str, Sequence[Mapping[str, float]]]
_PAPER = ("mean", "max", "p75", "p50", "p25", "geomean", "success", "> 1.01x")


def experiment_page(
    plan: Plan, results: Results, facts: Mapping[str, str], *, cheats: Cheats | None = None
) -> str:
    """The whole page as text."""
    label = "; ".join(sorted({str(one["label"]) for one in results})) or "no results"
    size = (
        f"{counted(len({one['seed'] for one in results}), 'seed')}, {counted(len(results), 'run')}"
    )
    intro = f"{plan.endpoint} Numbers: {label}. {size}, plan {plan.digest}."
    stages = Section("Stages", [*tables_of(plan, results), *_figures(plan, results)])
    sections = [stages, Section("What may be said", _said(plan, results))]
    if cheats:
        sections.append(Section("Cheats", _cheats(cheats)))
    return article(f"Training: {plan.name}", intro, [*sections, _reading()], facts)


def tables_of(plan: Plan, results: Results) -> list[Table]:
    """What a terminal shows too: stages in the paper's format in both conventions, arms, collected
    samples.
    """
    rows = stage_tables(results)
    tables = [
        paper_table(
            [pair[0] for pair in rows],
            "Best of a task's exam samples; tasks x seeds; a failure counts as 0, as in the paper",
        ),
        paper_table(
            [pair[1] for pair in rows], "The same; a failure counts as 1, since the reference runs"
        ),
        *_arm_tables(plan, results),
    ]
    stages = [one["stages"] for one in results[:1]]
    return [*tables, *(collected_table(told["collected"]) for told in stages)] if results else []


def paper_table(rows: Sequence[TableRow], caption: str) -> Table:
    """In the columns of the paper's tables, and the geometric mean (failures 1)."""
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


def collected_table(collected: Mapping[str, Mapping[str, int]]) -> Table:
    """Attempts of every generator by what became of them."""
    outcomes = ("ok", "wrong", "compile", "run", "hack", "unstable", "undecodable")
    rows = [
        [name, str(told["attempts"]), *(str(told.get(outcome, 0)) for outcome in outcomes)]
        for name, told in collected.items()
    ]
    return Table(
        "Stage 1, samples collected (first seed)", ("generator", "attempts", *outcomes), rows
    )


def run_sections(curve: Sequence[Mapping[str, float]], label: str) -> list[Section]:
    """A single run of stage 3, step by step."""
    if not curve:
        return []
    picked = (
        [curve[round(i * (len(curve) - 1) / 9)] for i in range(10)]
        if len(curve) > 10
        else list(curve)
    )
    columns = ("step", "programs", "success", "speedup", "best", "hack", "undecodable")
    rows = [
        [
            f"{one[name]:.0f}" if name in ("step", "programs") else f"{one[name]:.3f}"
            for name in columns
        ]
        for one in picked
    ]
    parts: list[str | Table | Figure] = [Table(f"Stage 3, {label}", columns, rows)]
    able, why = plots.available()
    if not able:
        return [Section("Run", [f"No plots on this page: {why}.", *parts])]
    steps = [one["step"] for one in curve]
    shares = [
        plots.Curve(name, steps, [one[name] for one in curve])
        for name in ("success", "hack", "undecodable")
    ]
    reward = [plots.Curve("mean of all samples", steps, [one["speedup"] for one in curve])]
    best = [
        plots.Curve(
            "best so far", [one["programs"] for one in curve], [one["best"] for one in curve]
        )
    ]
    parts += [
        _drawn(
            reward, f"Mean speed-up of a sample, failures 0 ({label})", "step", "speed-up", "reward"
        ),
        _drawn(shares, f"Shares of samples ({label})", "step", "share", "shares"),
        _drawn(
            best,
            f"Geometric mean over tasks of the best so far ({label})",
            "different programs",
            "speed-up",
            "best",
        ),
    ]
    return [Section("Run", parts)]


def _arm_tables(plan: Plan, results: Results) -> list[Table]:
    """What arms can do on tasks they were trained on, and on others: apart, so that both fit on a
    page.
    """
    told, ceiling = summaries(results, plan), ceilings(results)
    trained = [
        [
            f"{one.arm} {one.title}", str(one.seeds), f"{one.success:.3f}", f"{one.speedup:.3f}",
            ABSENT if one.log_speedup is None else f"{one.log_speedup:+.3f}",
        ]
        for one in told
    ]  # fmt: skip
    exam = Table(
        "Arms: exam on training tasks", ("arm", "seeds", "success", "mean", "log mean"), trained
    )
    names, kinds = (list(told[0].best), list(told[0].reached)) if told else ([], [])
    if not names:
        return [exam]
    rows = [
        [
            one.arm, *(f"{one.best[name]:.3f}" for name in names), *(f"{one.reached[kind]:.2f}" for kind in kinds),
            ABSENT if one.programs is None else f"{one.programs:.1f}", ABSENT if one.deviation is None else f"{one.deviation:.3f}",
        ]
        for one in told
    ]  # fmt: skip
    if ceiling:
        best = [f"{ceiling[name.split()[0]]:.3f}" for name in names]
        rows.append(["best", *best, *["1.00"] * len(kinds), ABSENT, ABSENT])
    caption = (
        "Held-out tasks: geometric mean of the best after so many programs, failures 1, and of the best there is; "
        f"share of tasks that came within 5 % of that; different programs a task, of {plan.held_out.measurements} at most: "
        "who wrote few has no more to choose from"
    )
    columns = (
        "arm",
        *names,
        *(f"within 5 %, {kind}" for kind in kinds),
        "programs",
        "sd over seeds",
    )
    return [exam, Table(caption, columns, rows)]


def _said(plan: Plan, results: Results) -> list[str | Table | Figure]:
    found = comparisons(results, plan)
    rows = [
        [
            f"{c.one} - {c.other}, held-out {c.kind}" + (" (primary)" if c.primary else ""), *_interval(c.difference),
            f"{c.adjusted:.3f}", c.says,
        ]
        for c in found
    ]  # fmt: skip
    last = max(plan.held_out.reported)
    parts: list[str | Table | Figure] = [
        Table(
            f"Log speed-up after {last} programs, paired; 95 % intervals",
            ("comparison", *_COLUMNS, "p, adjusted", "says"),
            rows,
        )
    ]
    others = {**stage_rise(results), **crossed(results, plan)}
    if others:
        rows = [
            [name, *_interval(d), "yes" if d.excludes_zero else "no"] for name, d in others.items()
        ]
        parts.append(
            Table(
                "Further differences, without correction",
                ("difference", *_COLUMNS, "excludes 0"),
                rows,
            )
        )
    few = len({one["seed"] for one in results})
    if few < 8:
        parts.insert(
            0,
            f"{counted(few, 'seed')}: intervals over so few say little, whatever they say. An experiment has at least 8.",
        )
    return parts


_COLUMNS = ("mean", "95 % interval", "seeds x tasks")


def _interval(d: Difference) -> tuple[str, str, str]:
    return f"{d.value:+.3f}", f"[{d.low:+.3f}, {d.high:+.3f}]", f"{d.seeds} x {d.tasks}"


def _figures(plan: Plan, results: Results) -> list[str | Figure]:
    able, why = plots.available()
    if not able:
        return [f"No plots on this page: {why}."]
    lines: dict[str, list[plots.Curve]] = defaultdict(list)
    held_out = {kind: best_curves(results, kind) for one in results[:1] for kind in one["kinds"]}
    for arm in ARMS:
        own = [one for one in results if one["arm"] == arm]
        if not own:
            continue
        for name in ("speedup", "success"):
            lines[name].append(_over_seeds(arm, [one["curve"] for one in own], "step", name))
        if all("entropy" in point for one in own for point in one["curve"]):
            lines["entropy"].append(
                _over_seeds(arm, [one["curve"] for one in own], "step", "entropy")
            )
        lines["train"].append(_over_seeds(arm, [one["curve"] for one in own], "programs", "best"))
        for kind, tasks in own[0]["kinds"].items():
            if tasks:
                curves = [
                    curve
                    for one, curve in zip(results, held_out[kind], strict=True)
                    if one["arm"] == arm
                ]
                points = [
                    [{"programs": float(i + 1), "best": y} for i, y in enumerate(curve)]
                    for curve in curves
                ]
                lines[kind].append(_over_seeds(arm, points, "programs", "best"))
    for kind, value in ceilings(results).items():
        if places := [x for curve in lines[kind] for x in curve.x]:
            ends = [min(places), max(places)]
            lines[kind].append(plots.Curve("the best there is", ends, [value, value]))
    return [_figure_of(name, drawn) for name, drawn in lines.items() if drawn]


def _figure_of(name: str, lines: Sequence[plots.Curve]) -> Figure:
    by_step = {
        "speedup": ("Mean speed-up of a training sample, failures 0", "speed-up"),
        "success": ("Share of training samples that succeed", "share"),
        "entropy": ("Entropy of the policy, arms that learn", "nats a token"),
    }
    if name in by_step:
        return _drawn(lines, by_step[name][0], "step", by_step[name][1], name)
    where = "training tasks" if name == "train" else f"held-out tasks ({name})"
    return _drawn(
        lines, f"Geometric mean of the best so far, {where}", "different programs", "speed-up", name
    )


def _over_seeds(
    name: str, curves: Sequence[Sequence[Mapping[str, float]]], x: str, y: str
) -> plots.Curve:
    """Mean over seeds and their range, as far as all of them go."""
    length = min(map(len, curves))
    values = [[curve[i][y] for curve in curves] for i in range(length)]
    places = [sum(curve[i][x] for curve in curves) / len(curves) for i in range(length)]
    low, high = (
        ([min(v) for v in values], [max(v) for v in values]) if len(curves) > 1 else ([], [])
    )
    title = ARMS[name].title.partition(" (")[0]  # a legend has room for the name
    return plots.Curve(f"{name} {title}", places, [sum(v) / len(v) for v in values], low, high)


def _cheats(cheats: Cheats) -> list[str | Table | Figure]:
    rows = [
        [name, *(f"{lines[i]['cheats']:.2f}" for i in (0, len(lines) // 2, -1)), f"{lines[-1]['believed']:.2f}",
         f"{lines[-1]['reported']:.2f}"]
        for name, lines in cheats.items()
    ]  # fmt: skip
    columns = (
        "evaluator",
        "cheats, first step",
        "middle",
        "last",
        "believed, last",
        "speed-up it reports, last",
    )
    parts: list[str | Table | Figure] = [
        "The same weights trained by an evaluator that compares roughly and trusts the program's own process, and by the judge.",
        Table("Share of samples that are cheats", columns, rows),
    ]
    if plots.available()[0]:
        lines = [
            plots.Curve(name, [p["step"] for p in told], [p["cheats"] for p in told])
            for name, told in cheats.items()
        ]
        parts.append(_drawn(lines, "Share of samples that are cheats", "step", "share", "cheats"))
    return parts


def _drawn(lines: Sequence[plots.Curve], caption: str, x: str, y: str, salt: str) -> Figure:
    return Figure(
        caption,
        plots.curves(lines, label=f"{caption}; the numbers are in the tables", x=x, y=y, salt=salt),
    )


def _reading() -> Section:
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
