"""The evaluation of a source as people read it: the reason first, then every check with its number,
then the times.

It takes the document that `cudal1 judge` writes (see `cli.commands.judge`), so that the screen and
the file cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.report import Interval

__all__ = ["describe_outcome", "show_evaluation"]


def describe_outcome(document: Mapping[str, Any]) -> str:
    """One paragraph: what was decided, and why."""
    timing = document["timing"]
    if document["outcome"] == "accepted":
        checks = text.count_text(len(document["checks"]), "check")
        return f"accepted: {_speed(timing)} as fast as {timing['baseline']}, the fastest baseline; {checks} passed"
    if document["outcome"] == "not_faster":
        return f"right, but not faster enough: {document['reason']}"
    if document["outcome"] == "refused":
        return f"refused by {document['detector']}: {document['reason']}"
    # CUDA-L1's authors withdrew these lines: they are counted, never dropped.
    if document["outcome"] == "withdrawn":
        return "withdrawn: the line holds no candidate"
    # What remains of the outcomes; see `cli.commands.verdicts.EXIT_CODES`.
    return f"the reference cannot be used: {document['reason']}"


def show_evaluation(screen: Screen, document: Mapping[str, Any]) -> None:
    """Reason, checks, timing, baselines, and where the time went."""
    # A reason may hold a whole traceback.
    screen.line(text.brief(describe_outcome(document), 2_000))
    if document["checks"]:
        screen.line("")
        columns = ("check", "passed", "value", "limit", "detail")
        screen.table(columns, [_check(check) for check in document["checks"]])
    if document["baselines"]:
        screen.line("")
        screen.table(("baseline", "per call"), _baselines(document["baselines"]))
    if timing := document["timing"]:
        baseline, candidate = (
            text.latency(timing["baseline_us"]),
            text.latency(timing["candidate_us"]),
        )
        screen.line(
            f"candidate {candidate}, {timing['baseline']} {baseline} a call: {_speed(timing)} in {timing['pairs']} pairs"
        )
    spent = ", ".join(
        f"{name} {text.duration(seconds)}"
        for name, seconds in document["elapsed_s"].items()
        # Shown with one decimal: shorter phases would read as 0.0 s.
        if seconds >= 0.05
    )
    screen.line(
        f"profile {document['profile']}, contract {document['contract']['precision']}, on {document['device']}; took {spent}"
    )
    # Of a refused candidate it does not matter what else would have been asked.
    if document["outcome"] in ("accepted", "not_faster"):
        screen.line(_describe_unasked(document))
    if note := document.get("other_load"):
        screen.line(f"\n{note}")


def _describe_unasked(document: Mapping[str, Any]) -> str:
    questions = document["not_asked"]
    if not questions:
        return "every check was asked"
    head = f"not asked at profile {document['profile']}:"
    return "\n".join((head, *(f"  {line}" for line in questions)))


def _speed(timing: Mapping[str, Any]) -> str:
    return text.speedup(Interval(timing["speedup"], timing["low"], timing["high"]))


def _check(check: Mapping[str, Any]) -> list[str]:
    numbers = [
        # A check without a number (a yes or no) must not show a 0.
        text.ABSENT if check[name] is None else f"{check[name]:.3g}"
        for name in ("value", "limit")
    ]
    return [
        check["name"],
        "yes" if check["passed"] else "NO",
        *numbers,
        text.brief(check["detail"]),
    ]


def _baselines(baselines: Mapping[str, Any]) -> list[list[str]]:
    rows = [[name, text.latency(value)] for name, value in baselines["medians_us"].items()]
    return rows + [
        # A baseline that failed is listed: without it the fastest of the others looks like the
        # fastest of all.
        [name, text.brief(f"did not run: {reason}", 120)]
        for name, reason in baselines["failures"].items()
    ]
