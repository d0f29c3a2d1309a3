"""Explanations and plans as tables on a screen; it computes nothing. The HTML page
(`cli.view.page`) says the same with plots.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.report import Explanation, Plan, RegionReport

__all__ = ["show_explanation", "show_plan"]


def show_explanation(screen: Screen, explanation: Explanation) -> None:
    """Regions, what was tried, what was left out, and the whole model's times if they were
    measured.
    """
    screen.line(
        f"{explanation.target} on {explanation.device}: {text.count_text(len(explanation.regions), 'region')}"
    )
    _show_regions(screen, explanation.regions)
    _show_candidates(screen, explanation.regions)
    for reason in explanation.left_out:
        # A reason may hold a whole traceback.
        screen.line(f"left to PyTorch: {text.brief(reason)}")
    measured = explanation.end_to_end
    # `explain` measures nothing end to end; the demo does.
    if measured is not None:
        screen.line(
            f"end to end: {text.latency(measured.ours_us)}; {text.speedup(measured.vs_eager)} vs eager, "
            f"{text.speedup(measured.vs_inductor)} vs Inductor"
        )
    # The field is called `gate` because stored reports have that key; it is the end-to-end check.
    for note in explanation.gate:
        screen.line(f"measured before it was put in place: {note}")
    if explanation.undone:
        screen.line(f"taken back, the module's own forward runs: {explanation.undone}")
    screen.line("")


def _show_regions(screen: Screen, regions: Sequence[RegionReport]) -> None:
    if not regions:
        return
    columns = ("region", "runs", "vs eager", "vs Inductor", "time", "error ratio", "why")
    rows = [
        [
            region.name or "whole graph",
            region.runs,
            text.speedup(region.vs_eager),
            text.speedup(region.vs_inductor),
            text.latency(region.runs_us),
            text.ratio(region.error_ratio),
            region.reason,
        ]
        for region in regions
    ]
    screen.table(columns, rows)


def _show_candidates(screen: Screen, regions: Sequence[RegionReport]) -> None:
    rows = [
        [
            region.name or region.key[:12],
            str(candidate.get("label") or text.ABSENT),
            text.decision(str(candidate.get("decision") or text.ABSENT)),
            str(candidate.get("detector") or text.ABSENT),
            str(candidate.get("reason") or text.ABSENT),
        ]
        for region in regions
        # Baselines stand among the candidates, so that it shows why each of them does not run.
        for candidate in (*region.raced, *region.tried)
    ]
    if rows:
        screen.line("")
        screen.table(("region", "candidate", "decision", "found by", "why"), rows)


def show_plan(screen: Screen, plan: Plan) -> None:
    """Expected gains, largest share of the time first as the plan orders them."""
    screen.line(
        f"{plan.target} on {plan.device}: expected end to end {text.speedup(plan.expected_end_to_end)}"
    )
    rows = [
        [
            row.region,
            # A fusion group's share is part of its region's share, so it has none of its own.
            text.ABSENT if row.share_of_time is None else f"{row.share_of_time:.0%}",
            text.speedup(row.expected_speedup),
            "stored" if row.cached else "estimate",
            " + ".join(row.techniques) or text.ABSENT,
            row.reason,
        ]
        for row in plan.rows
    ]
    screen.table(("region", "share", "speed-up", "known from", "techniques", "why"), rows)
    screen.line("")
