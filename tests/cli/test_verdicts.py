"""An evaluation's document has every key whatever the outcome, and its exit code."""

from __future__ import annotations

import argparse
import hashlib
import json
from typing import Any

import pytest
import torch

from tests.cli.scripted_evaluator import DECISIONS, KEYS, ScriptedEvaluator
from torch_cudal1.cli.commands.verdicts import (
    EXIT_CODES,
    SCHEMA,
    evaluation_document,
    evaluation_job,
    evaluation_outcome,
    sha256,
    unusable_document,
    withdrawn_document,
)
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Rejected, Verdict
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluation, SourceEvaluationConfig
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceCandidate


def make_job(**options: Any) -> SourceEvaluationConfig:
    args = argparse.Namespace(**{"profile": "fast", "inference": False, **options})
    return evaluation_job(args, Settings(precision="strict"), torch.device("cpu"), trust="own")


def evaluate(candidate: str) -> SourceEvaluation:
    ScriptedEvaluator.candidates = []
    return ScriptedEvaluator(make_job()).evaluate("reference", candidate)


def test_the_command_line_chooses_profile_and_gradients() -> None:
    job = make_job(profile="standard", inference=True)
    assert (job.profile, job.gradients, job.trust) == ("standard", False, "own")
    assert job.contract.precision == "strict"
    assert make_job().gradients


@pytest.mark.parametrize(
    ("candidate", "outcome", "code"),
    [
        ("faster", "accepted", 0),
        ("slow", "not_faster", 4),
        ("wrong", "refused", 3),
        ("odd", "reference_unusable", 2),
    ],
)
def test_each_outcome_has_its_exit_code(candidate: str, outcome: str, code: int) -> None:
    assert evaluation_outcome(evaluate(candidate)) == outcome
    assert EXIT_CODES[outcome] == code


def test_a_candidate_that_is_right_and_was_never_timed_is_refused() -> None:
    passed = Verdict((CheckResult("numerics", True),))
    untimed = SourceEvaluation(SourceCandidate("x"), Rejected("out of memory", "timing"), passed)
    assert evaluation_outcome(untimed) == "refused"


@pytest.mark.parametrize("candidate", DECISIONS)
def test_a_document_has_every_key_and_is_json(candidate: str) -> None:
    document = evaluation_document(evaluate(candidate), make_job(), reference="reference")
    assert set(document) == KEYS
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert (document["schema"], document["device"]) == (SCHEMA, "cpu")
    assert document["sha256"]["candidate"] == hashlib.sha256(candidate.encode()).hexdigest()


def test_a_timing_says_what_it_saves_and_repeats_nothing() -> None:
    timing = evaluation_document(evaluate("faster"), make_job(), reference="r")["timing"]
    assert timing["saved_us"] == 50.0
    assert not {"verdict", "baselines_us"} & set(timing)


def test_documents_without_an_evaluation_have_the_same_keys() -> None:
    error = ReferenceFailure("reading the reference", "it defines no Model")
    unusable = unusable_document(error, make_job(), reference="r", candidate="c")
    withdrawn = withdrawn_document(make_job(), reference="r")
    assert set(unusable) == set(withdrawn) == KEYS
    assert (unusable["outcome"], unusable["detector"]) == ("reference_unusable", "inputs")
    assert unusable["reason"] == "it defines no Model"
    assert (withdrawn["outcome"], withdrawn["reason"]) == ("withdrawn", "no code")
    assert withdrawn["sha256"]["candidate"] == sha256("")


def test_a_source_with_lone_surrogates_has_a_digest() -> None:
    assert len(sha256("\ud800")) == 64
    assert sha256("\ud800") != sha256("")
