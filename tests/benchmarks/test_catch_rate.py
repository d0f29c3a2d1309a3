"""The catch rate: the other rule is what it says, the table counts what was measured, and a run
goes on where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import catch_rate
from benchmarks.report import load

REFERENCE = """
import torch

class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x)

def get_inputs(): return [torch.randn(8, 16)]
def get_init_inputs(): return [16]
"""
CANDIDATE = REFERENCE.replace("Model(", "ModelNew(")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("result", "accepted"),
    [
        ("self.linear(x)", [True, True]),
        ("self.linear(x) + 5e-3", [False, True]),
        ("no_such_name", [False, False]),
    ],
)
def test_the_rule_is_allclose_on_random_inputs(result: str, accepted: list[bool]) -> None:
    answer = catch_rate.apply_kernelbench_rule(
        REFERENCE, CANDIDATE.replace("self.linear(x)", result), CPU
    )
    assert answer["accepted"] == accepted
    assert ("no_such_name" in answer["reason"]) == (result == "no_such_name")


def make_row(case: str, side: str, refused: bool, accepted: list[bool] | None) -> dict[str, Any]:
    judge = {
        "refused": refused,
        "detector": "numerics" if refused else "",
        "reason": "a reason" if refused else "",
    }
    rule = None if accepted is None else {"accepted": accepted, "reason": ""}
    return {
        "case": case,
        "side": side,
        "group": case.split("/")[0],
        "judge": judge,
        "kernelbench": rule,
    }


ROWS = [
    make_row("state/a", "cheat", True, [True, True]),
    make_row("state/a", "honest", False, [True, True]),
    make_row("state/b", "cheat", False, [False, True]),
    make_row("state/b", "honest", True, [True, True]),
    make_row("memory/c", "cheat", True, None),
]
ENVIRONMENT = {"gpu": "", "cpu": "a CPU", "torch": "2.13.0"}


def test_the_table_counts_and_names_what_went_wrong() -> None:
    text = catch_rate.make_table(
        {"rows": ROWS, "environment": ENVIRONMENT, "command": "python -m it"}
    )
    assert "| state | 2 | 1 of 2 | 1 of 2 | 0 of 2 | 1 of 2 |" in text
    assert "| memory | 1 | 1 of 1 | - | - | - |" in text
    assert "| **all** | 3 | 2 of 3 | 1 of 2 | 0 of 2 | 1 of 2 |" in text
    assert "Wrong verdicts of the judge: 2." in text
    assert "- `state/b`, honest: refused by numerics: a reason" in text
    assert "- `state/b`, cheat: accepted" in text


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated_cases: list[str] = []

    def evaluate_tasks(
        tasks: Any, args: argparse.Namespace
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        for task in tasks:
            evaluated_cases.append(task.case)
            case_row = make_row(task.case, task.side, task.side == "cheat", [True, True])
            yield task, {**case_row, "sha256": task.sha256}

    monkeypatch.setattr(catch_rate, "_evaluate_tasks", evaluate_tasks)
    command = ["--out", str(tmp_path / "out.json")]
    assert catch_rate.main([*command, "--only", "numerics/"]) == 0
    before = len(evaluated_cases)
    assert before > 0
    assert catch_rate.main([*command, "--only", "numerics/"]) == 0
    assert len(evaluated_cases) == before
    assert len(load(tmp_path / "out.json")["rows"]) == before
    assert catch_rate.main([*command, "--only", "caching/"]) == 0  # adds to what is there
    assert len(load(tmp_path / "out.json")["rows"]) == len(evaluated_cases) > before


def test_the_page_holds_what_was_measured() -> None:
    assert catch_rate.main(["--check"]) == 0, "run `python -m benchmarks.catch_rate --table`"
