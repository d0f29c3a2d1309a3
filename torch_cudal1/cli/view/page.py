"""A self-contained HTML page of explanations: what runs, how much faster, how exact, and why the
rest was refused.

Inline CSS and SVG, no script, no network; readable in light and dark, by keyboard, by a screen
reader and on paper. Every text that came from outside (names, reasons, paths) is escaped. It
computes nothing: numbers are shown as they were measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_cudal1.cli.view import plots, text
from torch_cudal1.cli.view.markup import document, table
from torch_cudal1.cli.view.markup import environment as environment_of
from torch_cudal1.cli.view.markup import escaped as _e
from torch_cudal1.core.report import OWN_FORWARD, EndToEnd, Explanation, Interval, RegionReport

__all__ = ["Story", "render", "winners"]


@dataclass(frozen=True, kw_only=True)
class Story:
    """One module of the page: errors are the whole module's largest scaled errors against float64;
    `problem` is what failed.

    `skipped` says why it was not tried.
    """

    explanation: Explanation
    description: str = ""
    problem: str = ""
    skipped: str = ""
    worst_error: float | None = None
    eager_error: float | None = None


def render(
    title: str, stories: Sequence[Story], environment: Mapping[str, str], *, intro: str = ""
) -> str:
    """The whole page as text; write it as UTF-8."""
    body = [
        f"<header><h1>{_e(title)}</h1><p>{_e(intro)}</p></header>",
        "<main>",
        _summary(stories),
        _plots(stories),
        '<section aria-labelledby="details"><h2 id="details">Module by module</h2>',
        *(_story(story) for story in stories),
        "</section>",
        _reading_guide(),
        environment_of(environment),
        "</main>",
    ]
    return document(title, body)


def winners(explanation: Explanation) -> str:
    """What was swapped in, for a table: "diag_matmul (2), fold_bn", or which baseline runs and why."""
    names = Counter(
        " + ".join(region.techniques) or region.runs
        for region in explanation.regions
        if region.swapped
    )
    if explanation.undone:
        taken = ", ".join(names) or ", ".join(
            sorted({region.runs for region in explanation.regions})
        )
        return f"eager runs: {taken} did not pay end to end"
    if names:
        return ", ".join(
            f"{label} ({count})" if count > 1 else label for label, count in names.items()
        )
    if not explanation.regions:
        return "eager runs: left to PyTorch"
    baselines = ", ".join(sorted({region.runs for region in explanation.regions}))
    if OWN_FORWARD in baselines:
        return "eager runs: no stored decision"
    return f"{baselines} runs: nothing beat it"


def _summary(stories: Sequence[Story]) -> str:
    columns = (
        "module",
        "regions",
        "what won",
        "speed-up vs eager",
        "speed-up vs torch.compile",
        "worst error vs float64",
        "eager's own error",
    )
    rows = []
    for story in stories:
        measured = story.explanation.end_to_end
        rows.append(
            [
                f'<a href="#{_anchor(story)}">{_e(story.explanation.target)}</a>',
                str(len(story.explanation.regions)),
                _outcome(story),
                _speed(measured.vs_eager if measured else None),
                _speed(measured.vs_inductor if measured else None),
                _e(text.error(story.worst_error)),
                _e(text.error(story.eager_error)),
            ]
        )
    caption = "End to end, host time included; 95 % intervals in brackets"
    return f'<section aria-labelledby="summary"><h2 id="summary">Summary</h2>{table(columns, rows, caption)}</section>'


def _outcome(story: Story) -> str:
    if story.problem:
        return f'<span class="bad">failed</span>: {_e(text.brief(story.problem))}'
    return f"skipped: {_e(story.skipped)}" if story.skipped else _e(winners(story.explanation))


def _plots(stories: Sequence[Story]) -> str:
    measured = [
        (s, s.explanation.end_to_end) for s in stories if s.explanation.end_to_end is not None
    ]
    able, why = plots.available()
    if not able:
        return f'<section><h2>Plots</h2><p class="note">No plots on this page: {_e(why)}. Every number is in the tables.</p></section>'
    if not measured:
        return ""
    speeds = [
        plots.SpeedupPair(s.explanation.target, e.vs_eager, e.vs_inductor) for s, e in measured
    ]
    exact = [
        plots.ErrorPair(s.explanation.target, s.eager_error, s.worst_error) for s, _ in measured
    ]
    speed_text = "Speed-up of every module against eager and torch.compile with 95 % intervals; the numbers are in the summary table"
    parts = [
        _figure(
            plots.speedups(speeds, label=speed_text),
            "Speed-up, end to end",
            ("against eager", "against torch.compile"),
        )
    ]
    if any(pair.ours is not None for pair in exact):
        error_text = "Largest error of every module against float64, eager's and ours; the numbers are in the summary table"
        keys = ("eager (ring)", "accelerated (diamond)")
        parts.append(
            _figure(plots.errors(exact, label=error_text), "Largest error against float64", keys)
        )
    return f'<section aria-labelledby="plots"><h2 id="plots">Plots</h2>{"".join(parts)}</section>'


def _figure(svg: str, caption: str, keys: tuple[str, str]) -> str:
    legend = "".join(
        f'<span><span class="key {name}"></span>{_e(key)}</span> '
        for name, key in zip(("first", "second"), keys, strict=True)
    )
    return f'<figure><figcaption>{_e(caption)} <span class="legend">{legend}</span></figcaption>{svg}</figure>'


def _story(story: Story) -> str:
    explanation = story.explanation
    parts = [f'<article id="{_anchor(story)}"><h3>{_e(explanation.target)}</h3>']
    if story.description:
        parts.append(f"<p>{_e(story.description)}</p>")
    if story.problem:
        parts.append(f'<p class="note bad">{_e(story.problem)}</p>')
    if explanation.end_to_end is not None:
        parts.append(_end_to_end(explanation.end_to_end))
    if explanation.undone:
        parts.append(
            f'<p class="note">Taken back, the module\'s own forward runs: {_e(explanation.undone)}</p>'
        )
    parts += [
        f'<p class="note">Measured before it was put in place: {_e(note)}</p>'
        for note in explanation.gate
    ]
    parts += [_region(region, undone=bool(explanation.undone)) for region in explanation.regions]
    if explanation.left_out:
        items = "".join(
            f"<li>{_e(text.brief(reason, 600))}</li>" for reason in explanation.left_out
        )
        parts.append(f"<p>Left to PyTorch, and why:</p><ul>{items}</ul>")
    return "".join(parts) + "</article>"


def _end_to_end(measured: EndToEnd) -> str:
    times = (
        ("eager", measured.eager_us),
        ("torch.compile", measured.inductor_us),
        ("accelerated", measured.ours_us),
    )
    items = "".join(
        f"<div><dt>{_e(name)}</dt><dd>{_e(text.latency(us))}</dd></div>" for name, us in times
    )
    return f'<dl class="times">{items}</dl>'


def _region(region: RegionReport, *, undone: bool) -> str:
    state, verb = ("swapped", "runs") if region.swapped else ("baseline", "runs")
    if undone:
        state, verb = "undone", "was best with"
    gain = (
        f" {text.speedup(_interval(region))} over the best baseline"
        if region.swapped and region.speedup is not None
        else ""
    )
    summary = f'<span class="tag {state}">{state}</span> <b>{_e(region.name or "whole graph")}</b> {verb} {_e(region.runs)}{_e(gain)}'
    facts = [
        ("why", region.reason),
        ("key", region.key[:16]),
        ("kind", f"{region.kind}, {region.granularity}"),
        ("speed-up vs eager", text.speedup(region.vs_eager)),
        ("speed-up vs Inductor", text.speedup(region.vs_inductor)),
        ("time per call", text.latency(region.runs_us)),
        (
            "baselines",
            ", ".join(f"{name} {text.latency(us)}" for name, us in region.baselines_us.items())
            or text.ABSENT,
        ),
        (
            "error ratio",
            f"{text.ratio(region.error_ratio)} of the baseline's own error"
            if region.error_ratio is not None
            else text.ABSENT,
        ),
        ("worst error vs float64", text.error(region.worst_error)),
    ]
    items = "".join(
        f"<div><dt>{_e(name)}</dt><dd>{_e(value)}</dd></div>"
        for name, value in facts
        if value not in ("", text.ABSENT)
    )
    return f"<details open><summary>{summary}</summary><dl>{items}</dl>{_tried((*region.raced, *region.tried))}</details>"


def _tried(tried: Sequence[Mapping[str, Any]]) -> str:
    if not tried:
        return '<p class="note">Nothing was raced or proposed for this region.</p>'
    columns = (
        "candidate",
        "decision",
        "why",
        "found by",
        "speed-up vs best baseline",
        "error ratio",
    )
    rows = []
    for one in tried:
        decision = str(one.get("decision", "unknown"))
        mark = {"accepted": "good", "runs": "good", "rejected": "bad", "failed": "bad"}.get(
            decision, ""
        )
        rows.append(
            [
                _e(one.get("label", "unnamed")),
                f'<span class="{mark}">{_e(decision)}</span>',
                _e(one.get("reason") or text.ABSENT),
                _e(one.get("detector") or text.ABSENT),
                f'<span class="num">{_e(_measured(one))}</span>',
                _e(text.ratio(one.get("error_ratio"))),
            ]
        )
    return table(columns, rows, "What was tried")


def _measured(one: Mapping[str, Any]) -> str:
    value, low, high = one.get("speedup"), one.get("low"), one.get("high")
    return text.speedup(
        Interval(value, low, high) if value and low and high and low <= value <= high else value
    )


def _interval(region: RegionReport) -> Interval | float | None:
    if region.speedup is None or region.low is None or region.high is None:
        return region.speedup
    return Interval(region.speedup, region.low, region.high)


def _reading_guide() -> str:
    return (
        '<section aria-labelledby="reading"><h2 id="reading">How to read this</h2><ul>'
        "<li>A speed-up is the other side's time over ours: above 1 is faster, if the whole interval is above 1.</li>"
        "<li>A swap needs a lower bound of at least 1.05 over the best baseline and 2 us saved per call; "
        "otherwise the baseline runs.</li>"
        "<li>An error ratio of 1 means as exact as the baseline; both are measured against a float64 run of the region.</li>"
        "<li>A rejected candidate was never run in your process. The column <i>found by</i> names the check that refused it.</li>"
        "</ul></section>"
    )


def _speed(value: Interval | None) -> str:
    if value is None:
        return text.ABSENT
    mark = "good" if value.low > 1 else "bad" if value.high < 1 else ""
    return f'<span class="num {mark}">{_e(text.speedup(value))}</span>'


def _anchor(story: Story) -> str:
    """An id made only of letters, digits and "-": a name cannot break out of the attribute."""
    return "m-" + "".join(
        c if c.isascii() and c.isalnum() else f"-{ord(c):x}-" for c in story.explanation.target
    )
