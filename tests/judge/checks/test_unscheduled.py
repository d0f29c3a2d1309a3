"""Every name under which the judge's code reports a failure is documented and classified."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch_cudal1
from torch_cudal1.judge.checks.registry import CHECK_NAMES, PROTOCOL
from torch_cudal1.judge.checks.unscheduled import FAILED_REQUESTS, TIMING_CHECKS
from torch_cudal1.judge.worker.session import HANDLERS

PACKAGE = Path(torch_cudal1.__file__).parent
# What imports no check, and reports results all the same.
REPORTING = ("device/peaks.py", "judge/benchmark", "judge/evaluate", "judge/reference")
# Where a result's name is among the arguments of a call.
NAME_ARGUMENT = {"CheckResult": 0, "CandidateFailure": 2}


def list_reported_names(tree: ast.AST) -> Iterator[str]:
    """The literal names in calls that make a result or a failure."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            position = NAME_ARGUMENT.get(node.func.id)
            if position is not None and len(node.args) > position:
                name = node.args[position]
                if isinstance(name, ast.Constant):
                    yield name.value


def read_reported_names() -> set[str]:
    paths = [
        path
        for place in REPORTING
        for path in ([PACKAGE / place] if place.endswith(".py") else (PACKAGE / place).glob("*.py"))
    ]
    return {name for path in paths for name in list_reported_names(ast.parse(path.read_text()))}


def test_every_reported_name_has_its_line_in_the_table() -> None:
    reported = read_reported_names()
    assert {"wall_slope", "timed_output", "unstable", "protocol"} <= reported
    assert reported - {check.name for check in CHECK_NAMES} - set(HANDLERS) == set()


def test_every_timing_check_is_reported_by_the_code_that_times() -> None:
    names = {check.name for check in TIMING_CHECKS}
    assert names - read_reported_names() <= {"timing"}, "the decision itself makes this one"


def test_no_name_here_is_a_step_of_the_protocol() -> None:
    scheduled = {check.name for check in PROTOCOL}
    assert scheduled.isdisjoint(check.name for check in (*TIMING_CHECKS, *FAILED_REQUESTS))
