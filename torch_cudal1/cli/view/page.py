"""A self-contained HTML page of explanations: what runs, how much faster, how exact, and why the
rest was refused.

Readable in light and dark, by keyboard, by a screen reader and on paper. It computes nothing:
numbers are shown as they were measured. The markup is `templates/explanations.html`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch_cudal1.cli.view import plots, text
from torch_cudal1.cli.view.templating import render_template
from torch_cudal1.core.report import OWN_FORWARD, EndToEnd, Explanation, Interval, RegionReport

__all__ = ["Story", "render", "winners"]

_SUMMARY_COLUMNS = (
    "module",
    "regions",
    "what won",
    "speed-up vs eager",
    "speed-up vs torch.compile",
    "worst error vs float64",
    "eager's own error",
)
_CANDIDATE_COLUMNS = (
    "candidate",
    "decision",
    "why",
    "found by",
    "speed-up vs best baseline",
    "error ratio",
)
_MARKS = {"accepted": "good", "runs": "good", "rejected": "bad", "failed": "bad"}


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


@dataclass(frozen=True)
class _Cell:
    """A table's cell that is more than text: `mark` is a CSS class, `link` the id of a place on the
    page, `remark` plain text behind it.
    """

    content: str
    mark: str = ""
    link: str = ""
    remark: str = ""


_Row: TypeAlias = list["str | _Cell"]


def render(
    title: str, stories: Sequence[Story], environment: Mapping[str, str], *, intro: str = ""
) -> str:
    """The whole page as text; write it as UTF-8."""
    # matplotlib is an optional extra. Without it the page says so; all numbers are in its tables.
    can_plot, reason = plots.available()
    return render_template(
        "explanations.html",
        title=title,
        intro=intro,
        summary={
            "columns": _SUMMARY_COLUMNS,
            "rows": [_make_summary_row(story) for story in stories],
        },
        no_plots="" if can_plot else reason,
        plots=_draw_plots(stories) if can_plot else [],
        modules=[_describe_module(story) for story in stories],
        candidate_columns=_CANDIDATE_COLUMNS,
        environment=environment,
    )


def winners(explanation: Explanation) -> str:
    """What was swapped in, for a table: "diag_matmul (2), fold_bn", or which baseline runs and why."""
    # Equal techniques in many layers become one name with a number: a model may have hundreds of
    # regions.
    names = Counter(
        " + ".join(region.techniques) or region.runs
        for region in explanation.regions
        if region.swapped
    )
    baselines = ", ".join(sorted({region.runs for region in explanation.regions}))
    # Said first: techniques that won and were taken back must not read as running.
    if explanation.undone:
        return f"eager runs: {', '.join(names) or baselines} did not pay end to end"
    if names:
        return ", ".join(
            f"{label} ({count})" if count > 1 else label for label, count in names.items()
        )
    if not explanation.regions:
        return "eager runs: left to PyTorch"
    # A region that was never decided says nothing about what is fastest.
    if OWN_FORWARD in baselines:
        return "eager runs: no stored decision"
    return f"{baselines} runs: nothing beat it"


def _make_summary_row(story: Story) -> _Row:
    times = story.explanation.end_to_end
    return [
        _Cell(story.explanation.target, link=_make_anchor(story)),
        str(len(story.explanation.regions)),
        _describe_outcome(story),
        _format_speed(times.vs_eager if times else None),
        _format_speed(times.vs_inductor if times else None),
        text.error(story.worst_error),
        text.error(story.eager_error),
    ]


def _describe_outcome(story: Story) -> str | _Cell:
    # Failed comes before skipped: a reader must see an error first.
    if story.problem:
        return _Cell("failed", mark="bad", remark=f": {text.brief(story.problem)}")
    return f"skipped: {story.skipped}" if story.skipped else winners(story.explanation)


def _draw_plots(stories: Sequence[Story]) -> list[dict[str, Any]]:
    """The figures of the page; none where nothing was measured end to end."""
    # A bar needs a measurement; modules that failed or were skipped stay in the table.
    measured = [
        (s, s.explanation.end_to_end) for s in stories if s.explanation.end_to_end is not None
    ]
    if not measured:
        return []
    speeds = [
        plots.SpeedupPair(s.explanation.target, times.vs_eager, times.vs_inductor)
        for s, times in measured
    ]
    errors = [
        plots.ErrorPair(s.explanation.target, s.eager_error, s.worst_error) for s, _ in measured
    ]
    speed_label = (
        "Speed-up of every module against eager and torch.compile with 95 % intervals; "
        "the numbers are in the summary table"
    )
    figures = [
        {
            "svg": plots.plot_speedups(speeds, label=speed_label),
            "caption": "Speed-up, end to end",
            "legend": (("first", "against eager"), ("second", "against torch.compile")),
        }
    ]
    # Without a float64 run of any module the plot would be empty.
    if any(pair.accelerated is not None for pair in errors):
        error_label = (
            "Largest error of every module against float64, of eager and of the accelerated "
            "module; the numbers are in the summary table"
        )
        figures.append(
            {
                "svg": plots.plot_errors(errors, label=error_label),
                "caption": "Largest error against float64",
                "legend": (("first", "eager (ring)"), ("second", "accelerated (diamond)")),
            }
        )
    return figures


def _describe_module(story: Story) -> dict[str, Any]:
    explanation = story.explanation
    return {
        "anchor": _make_anchor(story),
        "name": explanation.target,
        "description": story.description,
        "problem": story.problem,
        "times": _list_times(explanation.end_to_end),
        "undone": explanation.undone,
        "end_to_end_notes": explanation.gate,
        "regions": [
            _describe_region(region, undone=bool(explanation.undone))
            for region in explanation.regions
        ],
        # Cut: a reason may hold a whole traceback of the compiler.
        "left_out": [text.brief(reason, 600) for reason in explanation.left_out],
    }


def _list_times(times: EndToEnd | None) -> list[tuple[str, str]]:
    if times is None:
        return []
    return [
        ("eager", text.latency(times.eager_us)),
        ("torch.compile", text.latency(times.inductor_us)),
        ("accelerated", text.latency(times.ours_us)),
    ]


def _describe_region(region: RegionReport, *, undone: bool) -> dict[str, Any]:
    state, verb = ("swapped", "runs") if region.swapped else ("baseline", "runs")
    # The region won its benchmark, and the whole call lost: it does not run.
    if undone:
        state, verb = "undone", "was best with"
    gain = (
        f" {text.speedup(_format_interval(region))} over the best baseline"
        if region.swapped and region.speedup is not None
        else ""
    )
    return {
        "state": state,
        "name": region.name or "whole graph",
        "outcome": f"{verb} {region.runs}{gain}",
        # What was not measured is left out rather than shown as 0.
        "facts": [pair for pair in _list_facts(region) if pair[1] not in ("", text.ABSENT)],
        "candidates": [_make_candidate_row(record) for record in (*region.raced, *region.tried)],
    }


def _list_facts(region: RegionReport) -> list[tuple[str, str]]:
    baselines = ", ".join(f"{name} {text.latency(us)}" for name, us in region.baselines_us.items())
    return [
        ("why", region.reason),
        # Enough of the key for `cudal1 show`.
        ("key", region.key[:16]),
        ("kind", f"{region.kind}, {region.granularity}"),
        ("speed-up vs eager", text.speedup(region.vs_eager)),
        ("speed-up vs Inductor", text.speedup(region.vs_inductor)),
        ("time per call", text.latency(region.runs_us)),
        ("baselines", baselines),
        (
            "error ratio",
            f"{text.ratio(region.error_ratio)} of the baseline's own error"
            if region.error_ratio is not None
            else text.ABSENT,
        ),
        ("worst error vs float64", text.error(region.worst_error)),
    ]


def _make_candidate_row(record: Mapping[str, Any]) -> _Row:
    decision = str(record.get("decision", "unknown"))
    return [
        str(record.get("label", "unnamed")),
        _Cell(text.decision(decision), mark=_MARKS.get(decision, "")),
        str(record.get("reason") or text.ABSENT),
        str(record.get("detector") or text.ABSENT),
        _Cell(_format_candidate_speedup(record), mark="num"),
        text.ratio(record.get("error_ratio")),
    ]


def _format_candidate_speedup(record: Mapping[str, Any]) -> str:
    value, low, high = record.get("speedup"), record.get("low"), record.get("high")
    return text.speedup(
        # Records come from files, and `Interval` refuses ends that do not enclose the value.
        Interval(value, low, high) if value and low and high and low <= value <= high else value
    )


def _format_interval(region: RegionReport) -> Interval | float | None:
    # Baselines are timed without an interval.
    if region.speedup is None or region.low is None or region.high is None:
        return region.speedup
    return Interval(region.speedup, region.low, region.high)


def _format_speed(value: Interval | None) -> str | _Cell:
    if value is None:
        return text.ABSENT
    # Coloured only where the whole interval lies on one side of 1x.
    mark = "good" if value.low > 1 else "bad" if value.high < 1 else ""
    return _Cell(text.speedup(value), mark=f"num {mark}")


def _make_anchor(story: Story) -> str:
    """An id made only of letters, digits and "-": a name cannot break out of the attribute."""
    # Other characters become their code point, so two names never share an id.
    return "m-" + "".join(
        c if c.isascii() and c.isalnum() else f"-{ord(c):x}-" for c in story.explanation.target
    )
