"""Test helper: an evaluator of sources that answers by the candidate's text."""

from __future__ import annotations

from typing import Any

import pytest

from torch_cudal1.cli.commands import judge, release
from torch_cudal1.ir.records import Accepted, CheckResult, Rejected, Timing, Verdict
from torch_cudal1.judge.evaluate.source_baselines import Baselines
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluation, SourceEvaluationConfig
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceCandidate

RIGHT = Verdict(
    (CheckResult("numerics", True, 1.01, 2.0, "normal inputs"), CheckResult("special", True))
)


WRONG = Verdict((CheckResult("numerics", False, 7.0, 2.0, "a bias is missing"),))


KEYS = {
    *(
        "schema",
        "package",
        "profile",
        "contract",
        "gradients",
        "not_asked",
        "device",
        "target",
        "sha256",
        "outcome",
        "reason",
        "detector",
    ),
    *("numbers", "checks", "error_ratio", "timing", "baselines", "confinement", "elapsed_s"),
}


def timing(low: float) -> Timing:
    return Timing(
        RIGHT,
        "inductor",
        100.0,
        150.0,
        1.5,
        low,
        1.6,
        56,
        {"eager": 200.0, "inductor": 150.0},
        score=low,
    )


DECISIONS = {  # a candidate's text, and what becomes of it
    "faster": (Accepted(timing(1.4)), RIGHT),
    "slow": (
        Rejected(
            "speed-up over inductor is 1.500, at least 1.000", "timing", {"low": 1.0}, timing(1.0)
        ),
        RIGHT,
    ),
    "wrong": (Rejected("a bias is missing", "numerics", {"value": 7.0, "limit": 2.0}), WRONG),
    "odd": (
        Rejected("eager refuses the inputs made for it", "inputs"),
        Verdict((CheckResult("inputs", False),)),
    ),
}


class ScriptedEvaluator:
    """In place of `SourceEvaluator`: answers by the candidate's text."""

    candidates: list[str]

    def __init__(
        self, job: SourceEvaluationConfig, progress: Any = None, *, ahead: bool = False
    ) -> None:
        self.config = job

    def __enter__(self) -> ScriptedEvaluator:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def evaluate(self, reference: str, candidate: str) -> SourceEvaluation:
        ScriptedEvaluator.candidates.append(candidate)
        if reference == "broken":
            raise ReferenceFailure("reading the reference", "it defines no Model")
        decision, verdict = DECISIONS[candidate]
        baselines = (
            Baselines("inductor", {"eager": 200.0, "inductor": 150.0}, {"inductor+graph": "no GPU"})
            if verdict is RIGHT
            else None
        )
        return SourceEvaluation(
            SourceCandidate(candidate),
            decision,
            verdict,
            baselines,
            elapsed_s={"start": 3.0, "numerics": 0.2},
        )


def patch_evaluators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `cudal1 judge` use scripted evaluators, on a wide screen."""
    ScriptedEvaluator.candidates = []
    monkeypatch.setattr(release, "SourceEvaluator", ScriptedEvaluator)
    monkeypatch.setattr(
        judge,
        "evaluate_source",
        lambda reference, candidate, job, progress: ScriptedEvaluator(job).evaluate(
            reference, candidate
        ),
    )
    monkeypatch.setenv("COLUMNS", "200")
