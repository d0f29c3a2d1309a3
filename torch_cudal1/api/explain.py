"""Turns choices and their evidence into the records of `explanation`: what `explain` shows. It
measures and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch_cudal1.core.report import OWN_FORWARD, Explanation, Interval, RegionReport, per_call
from torch_cudal1.ir.records import Entry
from torch_cudal1.search.tune import Choice

__all__ = ["entry_report", "explanation_of"]


class Binding(Protocol):
    """What `binding` yields for a signature: its choices, and a sentence about the whole."""

    @property
    def choices(self) -> tuple[Choice, ...]: ...


def explanation_of(name: str, device: str, bindings: Sequence[Any]) -> Explanation:
    """One explanation over all signatures of a module. What was bound and does not hold now is told
    as what it is: left out.
    """
    waiting = {
        number: why for number, binding in enumerate(bindings) if (why := _why_it_waits(binding))
    }
    regions = [
        replace(report, runs=OWN_FORWARD, reason=waiting[number]) if number in waiting else report
        for number, binding in enumerate(bindings)
        for report in map(_region_report, binding.choices)
    ]
    reasons = [(getattr(binding, "reason", ""), binding.choices) for binding in bindings]
    undone = next((reason for reason, _ in reasons if reason.startswith("undone")), "")
    return Explanation(
        target=name,
        device=device,
        regions=tuple(regions),
        left_out=tuple(
            reason
            for reason, choices in [*reasons, *((why, ()) for why in waiting.values())]
            if reason and not choices
        ),
        undone=undone.removeprefix("undone: "),
        gate=tuple(
            note
            for number, binding in enumerate(bindings)
            if (note := getattr(binding, "note", "")) and number not in waiting
        ),
    )


def _why_it_waits(binding: Any) -> str:
    """Why what was bound for a signature does not run at present; "" if it does, or nothing was
    bound.
    """
    guard: Any = getattr(binding, "guard", None)
    left_out: str = getattr(binding, "reason", "")
    if guard is None or left_out or guard.holds():
        return ""
    return f"the module is not what it was when this was bound: {guard.why()}"


def _region_report(choice: Choice) -> RegionReport:
    if choice.entry is not None:
        return entry_report(choice.entry)
    return RegionReport(
        name=choice.region.name,
        key=choice.region.key,
        kind=choice.region.kind,
        granularity=choice.region.granularity,
        runs=OWN_FORWARD,
        origin="baseline",
        reason=choice.reason,
    )


def entry_report(entry: Entry) -> RegionReport:
    """An entry's evidence as a report."""
    timing: Mapping[str, Any] = entry.evidence.get("timing") or {}
    baselines = {name: float(us) for name, us in entry.evidence.get("baselines_us", {}).items()}
    ours = timing.get("candidate_us", baselines.get(entry.choice.schedule))
    return RegionReport(
        name=entry.region_name,
        key=entry.region_key,
        kind=str(entry.evidence.get("kind", "inference")),
        granularity=str(entry.evidence.get("granularity", "whole")),
        runs=entry.choice.label,
        origin=entry.choice.origin,
        techniques=entry.choice.techniques,
        schedule=entry.choice.schedule,
        speedup=timing.get("speedup"),
        low=timing.get("low"),
        high=timing.get("high"),
        vs_eager=_against(timing, baselines.get("eager"), ours),
        vs_inductor=_against(timing, baselines.get("inductor"), ours),
        baselines_us=baselines,
        runs_us=ours,
        error_ratio=_worst(entry, "numerics"),
        worst_error=_worst(entry, "numerics_worst"),
        raced=_raced(entry, ours),
        tried=entry.tried,
        reason=_reason(entry, timing)
        + (f"; tuned without Inductor: {why}" if (why := entry.without_inductor) else ""),
    )


def _raced(entry: Entry, ours_us: float | None) -> tuple[Mapping[str, Any], ...]:
    """Every baseline of the race, and why it is not what runs."""
    choice, medians = entry.choice, entry.evidence.get("baselines_us", {})
    runs = choice.schedule if choice.origin == "baseline" else ""
    least = min(medians.values(), default=0.0)
    found: list[Mapping[str, Any]] = []
    for name, us in sorted(medians.items(), key=lambda item: item[1]):
        told = (
            f"{per_call(us)}, {f'{us / least:.3f}x of ' if us > least else ''}the fastest baseline"
        )
        if name != runs and runs and us <= medians[runs]:
            told += f"; {runs} is as fast within noise, and simpler"
        elif not runs and ours_us:
            told += f"; what runs takes {per_call(ours_us)}"
        found.append(
            {"label": name, "decision": "runs" if name == runs else "beaten", "reason": told}
        )
    failures = entry.evidence.get("baseline_failures", {})
    return (
        *found,
        *({"label": name, "decision": "failed", "reason": why} for name, why in failures.items()),
    )


def _against(
    timing: Mapping[str, Any], baseline_us: float | None, ours_us: float | None
) -> Interval | None:
    """Speed-up over one baseline. The interval is the paired one, scaled: only the best baseline
    was paired with the candidate.
    """
    if not baseline_us or not ours_us:
        return None
    ratio = baseline_us / ours_us
    if not timing:
        return Interval(ratio, ratio, ratio)
    scale = ratio / timing["speedup"]
    return Interval(ratio, min(ratio, timing["low"] * scale), max(ratio, timing["high"] * scale))


def _worst(entry: Entry, name: str) -> float | None:
    values = [
        check["value"]
        for check in entry.evidence.get("checks", ())
        if check["name"] == name and check["value"] is not None
    ]
    return max(values, default=None)


def _reason(entry: Entry, timing: Mapping[str, Any]) -> str:
    if timing:
        return f"right under every check, and {timing['speedup']:.2f}x of the best baseline ({timing['baseline']})"
    if entry.evidence.get("granularity") == "island":
        return "a part of models: right under every check, and timed only inside the model it stands in"
    if not entry.evidence.get("baselines_us"):
        return "there was no candidate to try, so the baselines were not raced: a training step is measured as a whole"
    judged = sum(one.get("decision") != "not judged" for one in entry.tried)
    told = (
        f"of {judged} candidates judged, none was right and fast enough"
        if judged
        else "no candidate was judged"
    )
    return f"{entry.choice.schedule} is the fastest baseline; {told if entry.tried else 'there was nothing to try'}"
