"""An evaluation on the screen: the reason first, then every check, the times, and where time went."""

from __future__ import annotations

import argparse
import io
from typing import Any

import pytest
import torch

from tests.cli.scripted_evaluator import ScriptedEvaluator
from torch_cudal1.cli.commands.verdicts import (
    evaluation_document,
    evaluation_job,
    withdrawn_document,
)
from torch_cudal1.cli.view.evaluation import describe_outcome, show_evaluation
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.settings import Settings

JOB = evaluation_job(
    argparse.Namespace(profile="fast", inference=False),
    Settings(),
    torch.device("cpu"),
    trust="own",
)


def make_document(candidate: str, **changes: Any) -> dict[str, Any]:
    ScriptedEvaluator.candidates = []
    evaluation = ScriptedEvaluator(JOB).evaluate("reference", candidate)
    return evaluation_document(evaluation, JOB, reference="reference") | changes


def show(document: dict[str, Any]) -> str:
    out = io.StringIO()
    show_evaluation(Screen(out=out, err=io.StringIO(), width=160), document)
    return out.getvalue()


@pytest.mark.parametrize(
    ("candidate", "text"),
    [
        (
            "faster",
            "accepted: 1.50x [1.40, 1.60] as fast as inductor, the fastest baseline; 2 checks passed",
        ),
        ("slow", "right, but not faster enough: speed-up over inductor is 1.500, at least 1.000"),
        ("wrong", "refused by numerics: a bias is missing"),
        ("odd", "the reference cannot be used: eager refuses the inputs made for it"),
    ],
)
def test_an_outcome_is_one_paragraph(candidate: str, text: str) -> None:
    assert describe_outcome(make_document(candidate)) == text


def test_a_line_without_a_candidate_was_withdrawn() -> None:
    document = withdrawn_document(JOB, reference="reference")
    assert describe_outcome(document) == "withdrawn: the line holds no candidate"


def test_checks_show_their_numbers_and_no_zero_where_there_is_none() -> None:
    rows = [line.split() for line in show(make_document("faster")).splitlines()]
    numerics = next(row for row in rows if row[:1] == ["numerics"])
    assert numerics[1:4] == ["yes", "1.01", "2"]
    special = next(row for row in rows if row[:1] == ["special"])
    assert special[1:4] == ["yes", "-", "-"]
    wrong = show(make_document("wrong"))
    assert "NO" in wrong
    assert "baseline" not in wrong


def test_a_baseline_that_failed_is_listed_with_its_reason() -> None:
    shown = show(make_document("faster"))
    assert "did not run: no GPU" in shown
    assert "candidate 100 us, inductor 150 us a call: 1.50x [1.40, 1.60] in 56 pairs" in shown


def test_phases_that_took_no_time_are_not_listed() -> None:
    shown = show(make_document("wrong", elapsed_s={"start": 3.0, "numerics": 0.01}))
    last = shown.splitlines()[-1]
    assert last == "profile fast, contract match, on cpu; took start 3.0 s"


def test_a_long_reason_is_cut() -> None:
    shown = show(make_document("wrong", reason="x" * 10_000))
    assert max(map(len, shown.splitlines())) < 2_100


def test_what_a_profile_leaves_out_is_told_of_a_candidate_that_passed() -> None:
    shown = show(make_document("faster")).splitlines()
    head = shown.index("not asked at profile fast:")
    assert any(line.startswith("  dtypes: cast to the other") for line in shown[head:])
    assert not any("(--inference)" in line for line in shown)
    assert show(make_document("slow", not_asked=[])).splitlines()[-1] == "every check was asked"
    assert "not asked" not in show(make_document("wrong"))


def test_other_load_is_the_last_word() -> None:
    note = "Other processes used 60% of this machine's processors"
    assert show(make_document("faster", other_load=note)).splitlines()[-1] == note
