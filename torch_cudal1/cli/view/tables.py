"""Explanations and plans as tables on a screen; it computes nothing. The HTML page
(`cli.view.page`) says the same with plots.
"""

from __future__ import annotations

from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.report import Explanation, Plan

__all__ = ["show_explanation", "show_plan"]


def show_explanation(screen: Screen, explanation: Explanation) -> None:
    """Regions, what was tried, what was left out, and the whole model's times if they were
    measured.
    """
    screen.line(
        f"{explanation.target} on {explanation.device}: {text.count_text(len(explanation.regions), 'region')}"
    )
    if explanation.regions:
        columns = ("region", "runs", "vs eager", "vs Inductor", "time", "error ratio", "why")
        screen.table(
            columns,
            [
                [
                    r.name or "whole graph",
                    r.runs,
                    text.speedup(r.vs_eager),
                    text.speedup(r.vs_inductor),
                    text.latency(r.runs_us),
                    text.ratio(r.error_ratio),
                    r.reason,
                ]
                for r in explanation.regions
            ],
        )
    # Baselines stand among the candidates, so that it shows why each of them does not run.
    candidates = [
        (r.name or r.key[:12], candidate)
        for r in explanation.regions
        for candidate in (*r.raced, *r.tried)
    ]
    if candidates:
        screen.line("")
        rows = [
            [
                name,
                str(candidate.get("label") or text.ABSENT),
                text.decision(str(candidate.get("decision") or text.ABSENT)),
                str(candidate.get("detector") or text.ABSENT),
                str(candidate.get("reason") or text.ABSENT),
            ]
            for name, candidate in candidates
        ]
        screen.table(("region", "candidate", "decision", "found by", "why"), rows)
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
