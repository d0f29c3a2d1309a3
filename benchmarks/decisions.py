"""What the package recorded of its races and of what runs, as plain values for a results file.

For every contender of a whole graph a row then tells what it measured, or why it was not chosen. It
measures and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_cudal1.core import telemetry
from torch_cudal1.core.report import Explanation, plain

__all__ = ["decisions", "explained"]

_TOLD = {  # stage: what happened there; None: everything
    "capture": None,
    "judge": ("baselines", "end_to_end", "in_place", "accepted", "rejected", "arena", "sandbox"),
    "search": None,
    "swap": None,
    "bind": None,
    "backend": None,
    "run": None,
    "program": None,
}
_LEFT_OUT = (
    "techniques",
    "origin",
    "numbers",
    "schedule",
    "error_ratio",
)  # of a judgement: in its label, or of no use here
_LONGEST = 500


def decisions(report: telemetry.Report) -> list[dict[str, Any]]:
    """The events of races, judgements and swaps in order, `at_s` seconds after the first."""
    begin = report.events[0].at if report.events else 0.0
    return [
        {
            "at_s": round(event.at - begin, 2),
            "stage": event.stage,
            "what": event.what,
            **_short(event.facts),
        }
        for event in report.events
        if event.stage in _TOLD and event.what in (_TOLD[event.stage] or (event.what,))
    ]


def explained(explanation: Explanation) -> list[dict[str, Any]]:
    """Of every region what runs, and every baseline and candidate with the reason why it does not;
    then the whole call.
    """
    told: list[dict[str, Any]] = []
    for region in explanation.regions:
        contenders = [_short(one) for one in (*region.raced, *region.tried)]
        told.append(
            {"stage": "explain", "what": region.kind, "runs": region.runs, "contenders": contenders}
        )
    whole = {
        "gate": explanation.gate,
        "undone": explanation.undone,
        "left_out": explanation.left_out,
    }
    return [
        *told,
        {
            "stage": "explain",
            "what": "whole call",
            **_short({name: said for name, said in whole.items() if said}),
        },
    ]


def _short(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _cut(plain(value))
        for name, value in facts.items()
        if name not in _LEFT_OUT and value not in (None, "")
    }


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return (
            value
            if len(value) <= _LONGEST
            else f"{value[: _LONGEST // 2]} [...] {value[-_LONGEST // 2 :]}"
        )
    if isinstance(value, dict):
        return {name: _cut(item) for name, item in value.items()}
    return [_cut(item) for item in value] if isinstance(value, list) else value
