"""A judgement of a source as people read it: the reason first, then every check with its number,
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

__all__ = ["show_judgement", "told"]


def told(found: Mapping[str, Any]) -> str:
    """One paragraph: what was decided, and why."""
    timing = found["timing"]
    if found["outcome"] == "accepted":
        checks = text.counted(len(found["checks"]), "check")
        return f"accepted: {_speed(timing)} as fast as {timing['baseline']}, the fastest baseline; {checks} passed"
    if found["outcome"] == "not_faster":
        return f"right, but not faster enough: {found['reason']}"
    if found["outcome"] == "refused":
        return f"refused by {found['detector']}: {found['reason']}"
    if found["outcome"] == "withdrawn":
        return "withdrawn: the line holds no candidate"
    return f"the reference cannot be used: {found['reason']}"


def show_judgement(screen: Screen, found: Mapping[str, Any]) -> None:
    """Reason, checks, timing, baselines, and where the time went."""
    screen.line(text.brief(told(found), 2_000))
    if found["checks"]:
        screen.line("")
        columns = ("check", "passed", "value", "limit", "detail")
        screen.table(columns, [_check(check) for check in found["checks"]])
    if found["baselines"]:
        screen.line("")
        screen.table(("baseline", "per call"), _baselines(found["baselines"]))
    if timing := found["timing"]:
        us, ours = text.latency(timing["baseline_us"]), text.latency(timing["candidate_us"])
        screen.line(
            f"candidate {ours}, {timing['baseline']} {us} a call: {_speed(timing)} in {timing['pairs']} pairs"
        )
    spent = ", ".join(
        f"{name} {text.duration(seconds)}"
        for name, seconds in found["elapsed_s"].items()
        if seconds >= 0.05
    )
    screen.line(
        f"profile {found['profile']}, contract {found['contract']['precision']}, on {found['device']}; took {spent}"
    )


def _speed(timing: Mapping[str, Any]) -> str:
    return text.speedup(Interval(timing["speedup"], timing["low"], timing["high"]))


def _check(check: Mapping[str, Any]) -> list[str]:
    numbers = [
        text.ABSENT if check[name] is None else f"{check[name]:.3g}" for name in ("value", "limit")
    ]
    return [
        check["name"],
        "yes" if check["passed"] else "NO",
        *numbers,
        text.brief(check["detail"]),
    ]


def _baselines(found: Mapping[str, Any]) -> list[list[str]]:
    timed = [[name, text.latency(value)] for name, value in found["medians_us"].items()]
    return timed + [
        [name, text.brief(f"did not run: {reason}", 120)]
        for name, reason in found["failures"].items()
    ]
