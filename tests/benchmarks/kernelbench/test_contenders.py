"""The judge decides about a release's candidate."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kernelbench import contenders
from tests.benchmarks.kernelbench.examples import DIAGONAL, JOB


def test_the_judge_refuses_a_wrong_candidate_with_a_reason(tmp_path: Path) -> None:
    wrong = DIAGONAL.replace("class Model(", "class ModelNew(").replace("torch.diag(a) @ b", "b")
    answer = contenders.judge_candidate(DIAGONAL, wrong, JOB, tmp_path)
    assert answer["status"] == "refused"
    assert answer["reason"]
