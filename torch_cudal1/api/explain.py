"""Turns choices and their evidence into the records of `core.report`: what `explain` shows. It
measures and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch_cudal1.core.report import OWN_FORWARD, Explanation, Interval, RegionReport, per_call
from torch_cudal1.ir.records import BY_BLOCKS, Entry
from torch_cudal1.search.tune import Choice

__all__ = ["explain_bindings", "report_entry"]


class Binding(Protocol):
    """What `binding` yields for a signature: its choices, and a sentence about the whole."""

    @property
    def choices(self) -> tuple[Choice, ...]: ...


def explain_bindings(name: str, device: str, bindings: Sequence[Any]) -> Explanation:
    """One explanation over all signatures of a module. A binding that does not hold now is
    shown as left out.
    """
    # A report must not show a speed-up for a binding that does not run: with a hook registered,
    # every call goes to the module's own forward.
    waiting = {
        number: why
        for number, binding in enumerate(bindings)
        if (why := _explain_inactive_binding(binding))
    }
    regions = [
        replace(report, runs=OWN_FORWARD, reason=waiting[number]) if number in waiting else report
        for number, binding in enumerate(bindings)
        for report in map(_report_region, binding.choices)
    ]
    reasons = [(getattr(binding, "reason", ""), binding.choices) for binding in bindings]
    # `binding` marks what the end-to-end check took back by this word at the start of the reason.
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


def _explain_inactive_binding(binding: Any) -> str:
    """Why what was bound for a signature does not run at present; "" if it does, or nothing was
    bound.
    """
    guard: Any = getattr(binding, "guard", None)
    left_out: str = getattr(binding, "reason", "")
    if guard is None or left_out or guard.holds():
        return ""
    return f"the module is not what it was when this was bound: {guard.explain_difference()}"


def _report_region(choice: Choice) -> RegionReport:
    if choice.entry is not None:
        return report_entry(choice.entry)
    return RegionReport(
        name=choice.region.name,
        key=choice.region.key,
        kind=choice.region.kind,
        granularity=choice.region.granularity,
        runs=OWN_FORWARD,
        origin="baseline",
        reason=choice.reason,
    )


def report_entry(entry: Entry) -> RegionReport:
    """An entry's evidence as a report."""
    timing: Mapping[str, Any] = entry.evidence.get("timing") or {}
    baselines = {name: float(us) for name, us in entry.evidence.get("baselines_us", {}).items()}
    # Baselines have no paired timing of their own: their time is the median of the baseline
    # benchmark.
    runs_us = timing.get("candidate_us", baselines.get(entry.choice.schedule))
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
        vs_eager=_estimate_speedup_over(timing, baselines.get("eager"), runs_us),
        vs_inductor=_estimate_speedup_over(timing, baselines.get("inductor"), runs_us),
        baselines_us=baselines,
        runs_us=runs_us,
        error_ratio=_find_worst_value(entry, "numerics"),
        worst_error=_find_worst_value(entry, "numerics_worst"),
        raced=_list_baseline_rows(entry, runs_us),
        tried=entry.tried,
        reason=_describe_decision(entry, timing)
        + (f"; tuned without Inductor: {without}" if (without := entry.without_inductor) else ""),
    )


def _list_baseline_rows(entry: Entry, runs_us: float | None) -> tuple[Mapping[str, Any], ...]:
    """Every baseline of the benchmark, and why it is not what runs."""
    choice, medians = entry.choice, entry.evidence.get("baselines_us", {})
    runs = choice.schedule if choice.origin == "baseline" else ""
    fastest = min(medians.values(), default=0.0)
    rows: list[Mapping[str, Any]] = []
    for name, us in sorted(medians.items(), key=lambda item: item[1]):
        reason = f"{per_call(us)}, {f'{us / fastest:.3f}x of ' if us > fastest else ''}the fastest baseline"
        # A simpler schedule wins a tie, so a baseline may be listed with the shorter time and not
        # run.
        if name != runs and runs and us <= medians[runs]:
            reason += f"; {runs} is as fast within noise, and simpler"
        elif not runs and runs_us:
            reason += f"; what runs takes {per_call(runs_us)}"
        rows.append(
            {"label": name, "decision": "runs" if name == runs else "beaten", "reason": reason}
        )
    failures = entry.evidence.get("baseline_failures", {})
    return (
        *rows,
        *({"label": name, "decision": "failed", "reason": why} for name, why in failures.items()),
    )


def _estimate_speedup_over(
    timing: Mapping[str, Any], baseline_us: float | None, runs_us: float | None
) -> Interval | None:
    """Speed-up over one baseline. The interval is the paired one, scaled: only the best baseline
    was paired with the candidate.
    """
    if not baseline_us or not runs_us:
        return None
    ratio = baseline_us / runs_us
    if not timing:
        return Interval(ratio, ratio, ratio)
    # Both ends scale by the same factor: the noise is the candidate's and the best baseline's.
    # `min` and `max` keep the ratio inside its own interval after rounding.
    scale = ratio / timing["speedup"]
    return Interval(ratio, min(ratio, timing["low"] * scale), max(ratio, timing["high"] * scale))


def _find_worst_value(entry: Entry, name: str) -> float | None:
    values = [
        check["value"]
        for check in entry.evidence.get("checks", ())
        if check["name"] == name and check["value"] is not None
    ]
    return max(values, default=None)


def _describe_decision(entry: Entry, timing: Mapping[str, Any]) -> str:
    if entry.is_quick:
        return "quick tier: the fastest of PyTorch's own ways in this process; nothing was searched for"
    if entry.evidence.get("tier") == BY_BLOCKS:
        return _describe_blocks(entry)
    if timing:
        return f"right under every check, and {timing['speedup']:.2f}x of the best baseline ({timing['baseline']})"
    if entry.evidence.get("granularity") == "island":
        return "a part of models: right under every check, and timed only inside the model it stands in"
    if not entry.evidence.get("baselines_us"):
        return "there was no candidate to try, so the baselines were not benchmarked: a training step is measured as a whole"
    validated = sum(record.get("decision") != "not judged" for record in entry.tried)
    summary = (
        f"of {validated} validated candidates, none was right and fast enough"
        if validated
        else "no candidate was validated"
    )
    return f"{entry.choice.schedule} is the fastest baseline; {summary if entry.tried else 'there was nothing to try'}"


def _describe_blocks(entry: Entry) -> str:
    parts = [
        f"{block['occurrences']} times {block['key'][:12]} ({block['runs']})"
        for block in entry.evidence["blocks"]
    ]
    return f"decided by its blocks, each searched for once: {', '.join(parts)}"
