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
from benchmarks.kernelbench.plots import Curve, Dot, curves, dots
from benchmarks.kernelbench.statistics import BEST, fast_p, ratios, tuning_curve
from benchmarks.kernelbench.tables import Group, Table, groups, of_level
from torch_cudal1.cli.view.templating import style_sheet

__all__ = ["html_page", "markdown"]

_TITLE = "KernelBench"


def markdown(rows: Iterable[Mapping[str, Any]], *, every_task: bool = True) -> str:
    """All tables of all groups."""
    lines: list[str] = []
    for group in groups(rows):
        lines += [f"## {group.title}", "", group.about, ""]
        for table in group.tables:
            if every_task or table.title != "Every task":
                lines += _table_lines(table)
    return "\n".join(lines).rstrip()


def html_page(rows: Iterable[Mapping[str, Any]]) -> str:
    """The page as text; write it as UTF-8."""
    found = groups(rows)
    title = found[0].title if len(found) == 1 else _TITLE
    body = [f"<header><h1>{_e(title)}</h1></header><main>"]
    for group in found:
        body += [f"<section><h2>{_e(group.title)}</h2><p>{_e(group.about)}</p>", *_figures(group)]
        body += [_table(table) for table in group.tables]
        body.append("</section>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{_e(title)}</title>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{style_sheet()}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _figures(group: Group) -> list[str]:
    made = []
    for name in group.job.contenders:
        for level in sorted({int(row["task"]["level"]) for row in group.rows}):
            label = (
                f"{name} against the best baseline, level {level}; filled: something was swapped in"
            )
            made.append(_figure(dots(_dots(group, name, level), label), label))
    if OURS in group.job.contenders:
        found = ratios(group.rows, OURS)
        levels = sorted({ratio.level for ratio in found})
        shares = [Curve(f"level {level}", fast_p(of_level(found, level))) for level in levels]
        label = "fast_p: share of tasks right and more than p times as fast as the best baseline"
        made.append(_figure(curves(shares, label, "p", logarithmic_y=False), label))
        label = "Speed-up against the best baseline, geometric mean, over seconds of tuning"
        reached = [Curve("all", tuning_curve(group.rows, OURS))]
        made.append(_figure(curves(reached, label, "seconds a task", logarithmic_y=True), label))
    return made


def _dots(group: Group, name: str, level: int) -> list[Dot]:
    found = []
    for row in group.rows:
        if int(row["task"]["level"]) != level:
            continue
        best = row["against"].get(name, {}).get(BEST) or {"speedup": 1.0, "low": 1.0, "high": 1.0}
        facts = row["ours"] if name == OURS else row["arms"].get(name, {"swapped": True})
        label = f"{row['task']['key']} {row['task']['name']}"
        found.append(
            Dot(label, best["speedup"], best["low"], best["high"], bool(facts.get("swapped")))
        )
    return found


def _figure(svg: str, caption: str) -> str:
    return f"<figure><figcaption>{_e(caption)}</figcaption>{svg}</figure>" if svg else ""


def _table_lines(table: Table) -> list[str]:
    lines = [f"### {table.title}", "", *([table.note, ""] if table.note else [])]
    lines += [f"| {' | '.join(table.columns)} |", "|" + "---|" * len(table.columns)]
    lines += [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in table.rows
    ]
    return [*lines, ""]


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_e(name)}</th>' for name in table.columns)
    rows = "".join(
        "<tr>"
        + f'<th scope="row">{_e(row[0])}</th>'
        + "".join(f"<td>{_e(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    whole = f"<table><caption>{_e(table.note)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    inner = f'<div class="scroll">{whole}</div>'
    if len(table.rows) > 40:
        return f"<details><summary>{_e(table.title)} ({len(table.rows)} lines)</summary>{inner}</details>"
    return f"<h3>{_e(table.title)}</h3>{inner}"


def _e(text: str) -> str:
    return html.escape(text)
