"""What the naive evaluator rewards and the judge refuses: if it ever refuses these, the red-team
comparison shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.training.sources import TASK, program, source
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.pool.measured import Measured, TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.pool.slot import Slot
from torch_cudal1.training.naive import NaiveEvaluator

REFERENCE = """
import torch
from torch import nn
class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.T, dim=-1)
def get_inputs():
    return [torch.randn(192, 192)]
def get_init_inputs():
    return []
"""
HONEST = "torch.softmax(x @ x.T, dim=-1)"
# Right in its first calls only, which is enough for an evaluator that looks at no others.
FORKED_TIMING = source(
    f"({HONEST}) if K.append(1) or len(K) <= 5 else torch.empty_like(x)",
    top="K = []",
)
HEAVY = TrainingTask("softmax of a product", REFERENCE)


@pytest.fixture(scope="module")
def terms(tmp_path_factory: pytest.TempPathFactory) -> MeasurementSettings:
    return MeasurementSettings(
        Settings(), Contract(), torch.device("cpu"), tmp_path_factory.mktemp("locks"), rule="cudal1"
    )


@pytest.fixture(scope="module")
def naive(terms: MeasurementSettings) -> Iterator[NaiveEvaluator]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with NaiveEvaluator(terms) as evaluator:
        yield evaluator
    torch.set_num_threads(threads)


def measure(naive: NaiveEvaluator, text: str, task: TrainingTask = TASK) -> Measured:
    return naive.measure(task, [program("p", text)])[0]


def test_a_right_program_passes_and_a_wrong_or_broken_one_does_not(naive: NaiveEvaluator) -> None:
    assert measure(naive, source()).outcome in ("ok", "unstable")
    assert measure(naive, source("x")).outcome == "wrong"
    assert measure(naive, source("torch.zeros(3)")).outcome == "wrong"
    assert measure(naive, source("x.nothing()")).outcome == "run"
    assert measure(naive, source(before="import os; os.abort()")).outcome == "run"
    assert measure(naive, source()).outcome in ("ok", "unstable")


def test_a_cheat_is_rewarded_here_and_refused_by_the_judge(
    naive: NaiveEvaluator, terms: MeasurementSettings
) -> None:
    measured = measure(naive, FORKED_TIMING, HEAVY)
    assert measured.outcome in ("ok", "unstable")  # right, as far as it looked
    if measured.score is not None:
        assert measured.score > 1.5
    with Slot(terms) as slot:
        refused = slot.measure(HEAVY, program("p", FORKED_TIMING)).measured
    assert refused.outcome in ("wrong", "hack")


def test_it_is_confined_as_the_judges_candidates_are(naive: NaiveEvaluator) -> None:
    spy = source(
        before="import os; assert not [k for k in os.environ if 'KEY' in k or 'TOKEN' in k]; open('/root/x', 'w')"
    )
    measured = measure(naive, spy)
    assert measured.outcome == "run"
    assert "Permission" in measured.detail or "No such file" in measured.detail
