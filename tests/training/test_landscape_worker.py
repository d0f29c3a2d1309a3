"""The process of a naive evaluator."""

from __future__ import annotations

import pytest

from tests.training.landscape_cases import RIGHT, TASK, program
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.training.landscape.naive_pool import NaivePool


def test_the_trusting_process_asks_for_a_program_before_it_answers(naive: NaivePool) -> None:
    assert naive.speedup(TASK, program(TASK, RIGHT)) is not None  # in this thread
    child = naive._get_child()
    with pytest.raises(CandidateFailure, match="no module"):
        child.call("ready", reference=TASK.reference, candidate="raise ValueError('no module')")
    with pytest.raises(CandidateFailure, match="expected the verb `ready` first"):
        child.call("naive")
