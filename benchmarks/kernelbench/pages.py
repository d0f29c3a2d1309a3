"""The report: Markdown tables, and a self-contained HTML page with the same tables and plots of
every level.

Inline style and SVG, no script, no network; whatever came from outside (names, reasons) is escaped.
All numbers are `tables`'.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.kernelbench.job import OURS
from benchmarks.kernelbench.plots import Curve, Dot, draw_curves, draw_dots
from benchmarks.kernelbench.statistics import (
    BEST,
    compute_fast_p,
    compute_ratios,
    compute_tuning_curve,
)
from benchmarks.kernelbench.tables import Group, Table, group_rows, select_level
from torch_cudal1.cli.view.templating import style_sheet

__all__ = ["render_html", "render_markdown"]

_TITLE = "KernelBench"


def render_markdown(rows: Iterable[Mapping[str, Any]], *, every_task: bool = True) -> str:
    """All tables of all groups."""
    lines: list[str] = []
    for group in group_rows(rows):
        lines += [f"## {group.title}", "", group.about, ""]
        for table in group.tables:
            if every_task or table.title != "Every task":
                lines += _render_markdown(table)
    return "\n".join(lines).rstrip()


def render_html(rows: Iterable[Mapping[str, Any]]) -> str:
    """The page as text, to be written as UTF-8."""
    page_groups = group_rows(rows)
    title = page_groups[0].title if len(page_groups) == 1 else _TITLE
    body = [f"<header><h1>{_escape(title)}</h1></header><main>"]
    for group in page_groups:
        body += [
            f"<section><h2>{_escape(group.title)}</h2><p>{_escape(group.about)}</p>",
            *_draw_figures(group),
        ]
        body += [_render_table(table) for table in group.tables]
        body.append("</section>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{_escape(title)}</title>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{style_sheet()}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _draw_figures(group: Group) -> list[str]:
    figures = []
    for name in group.job.contenders:
        for level in sorted({int(row["task"]["level"]) for row in group.rows}):
            label = (
                f"{name} against the best baseline, level {level}; filled: something was swapped in"
            )
            figures.append(_wrap_figure(draw_dots(_make_dots(group, name, level), label), label))
    if OURS in group.job.contenders:
        package_ratios = compute_ratios(group.rows, OURS)
        levels = sorted({ratio.level for ratio in package_ratios})
        shares = [
            Curve(f"level {level}", compute_fast_p(select_level(package_ratios, level)))
            for level in levels
        ]
        label = "fast_p: share of tasks right and more than p times as fast as the best baseline"
        figures.append(_wrap_figure(draw_curves(shares, label, "p", logarithmic_y=False), label))
        label = "Speed-up against the best baseline, geometric mean, over seconds of tuning"
        tuning = [Curve("all", compute_tuning_curve(group.rows, OURS))]
        figures.append(
            _wrap_figure(draw_curves(tuning, label, "seconds a task", logarithmic_y=True), label)
        )
    return figures


def _make_dots(group: Group, name: str, level: int) -> list[Dot]:
    points = []
    for row in group.rows:
        if int(row["task"]["level"]) != level:
            continue
        best = row["against"].get(name, {}).get(BEST) or {"speedup": 1.0, "low": 1.0, "high": 1.0}
        facts = row["ours"] if name == OURS else row["arms"].get(name, {"swapped": True})
        label = f"{row['task']['key']} {row['task']['name']}"
        points.append(
            Dot(label, best["speedup"], best["low"], best["high"], bool(facts.get("swapped")))
        )
    return points


def _wrap_figure(svg: str, caption: str) -> str:
    return f"<figure><figcaption>{_escape(caption)}</figcaption>{svg}</figure>" if svg else ""


def _render_markdown(table: Table) -> list[str]:
    lines = [f"### {table.title}", "", *([table.note, ""] if table.note else [])]
    lines += [f"| {' | '.join(table.columns)} |", "|" + "---|" * len(table.columns)]
    lines += [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in table.rows
    ]
    return [*lines, ""]


def _render_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_escape(name)}</th>' for name in table.columns)
    rows = "".join(
        "<tr>"
        + f'<th scope="row">{_escape(row[0])}</th>'
        + "".join(f"<td>{_escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    table_html = f"<table><caption>{_escape(table.note)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    inner = f'<div class="scroll">{table_html}</div>'
    if len(table.rows) > 40:
        return f"<details><summary>{_escape(table.title)} ({len(table.rows)} lines)</summary>{inner}</details>"
    return f"<h3>{_escape(table.title)}</h3>{inner}"


def _escape(text: str) -> str:
    return html.escape(text)
