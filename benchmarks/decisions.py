"""What the package recorded of its measurements and of what runs, as plain values for a results
file.

For every contender of a whole graph a row then says what it measured, or why it was not chosen.
This module measures and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_cudal1.core import telemetry
from torch_cudal1.core.report import Explanation, plain

__all__ = ["collect_decisions", "describe_explanation"]

_SHOWN_EVENTS = {  # stage: what happened there; None: everything
    "capture": None,
    "judge": ("baselines", "end_to_end", "in_place", "accepted", "rejected", "arena", "sandbox"),
    "search": None,
    "swap": None,
    "bind": None,
    "backend": None,
    "run": None,
    "program": None,
}
# of a judgement: in its label, or of no use here
_OMITTED_FACTS = (
    "techniques",
    "origin",
    "numbers",
    "schedule",
    "error_ratio",
)
_MAX_TEXT_CHARS = 500


def collect_decisions(report: telemetry.Report) -> list[dict[str, Any]]:
    """The events of measurements, verdicts and swaps in order, `at_s` seconds after the first."""
    begin = report.events[0].at if report.events else 0.0
    return [
        {
            "at_s": round(event.at - begin, 2),
            "stage": event.stage,
            "what": event.what,
            **_shorten_facts(event.facts),
        }
        for event in report.events
        if event.stage in _SHOWN_EVENTS
        and event.what in (_SHOWN_EVENTS[event.stage] or (event.what,))
    ]


def describe_explanation(explanation: Explanation) -> list[dict[str, Any]]:
    """For every region what runs, and every baseline and candidate with the reason why it does not;
    then the whole call.
    """
    region_events: list[dict[str, Any]] = []
    for region in explanation.regions:
        contenders = [_shorten_facts(contender) for contender in (*region.raced, *region.tried)]
        region_events.append(
            {"stage": "explain", "what": region.kind, "runs": region.runs, "contenders": contenders}
        )
    call_facts = {
        "gate": explanation.gate,
        "undone": explanation.undone,
        "left_out": explanation.left_out,
    }
    return [
        *region_events,
        {
            "stage": "explain",
            "what": "whole call",
            **_shorten_facts({name: value for name, value in call_facts.items() if value}),
        },
    ]


def _shorten_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _shorten_value(plain(value))
        for name, value in facts.items()
        if name not in _OMITTED_FACTS and value not in (None, "")
    }


def _shorten_value(value: Any) -> Any:
    if isinstance(value, str):
        return (
            value
            if len(value) <= _MAX_TEXT_CHARS
            else f"{value[: _MAX_TEXT_CHARS // 2]} [...] {value[-_MAX_TEXT_CHARS // 2 :]}"
        )
    if isinstance(value, dict):
        return {name: _shorten_value(item) for name, item in value.items()}
    return [_shorten_value(item) for item in value] if isinstance(value, list) else value
