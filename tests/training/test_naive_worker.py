"""The naive request answers by the rule of early benchmarks: a ratio for what allclose accepts, else
a problem. It looks at nothing that the rule did not look at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.sources import REFERENCE, source
from torch_cudal1.judge.worker.session import HANDLERS as JUDGE_HANDLERS
from torch_cudal1.judge.worker.session import Session
from torch_cudal1.training import naive_worker

RIGHT = "torch.relu(x) * 2 + 1"


def measure(candidate: str, folder: Path, reference: str = REFERENCE) -> dict[str, Any]:
    request = {
        "seed": 7,
        "reference": reference,
        "candidate": candidate,
        "trials": 2,
        "buckets": 3,
    }
    return naive_worker.HANDLERS["naive"](Session(torch.device("cpu"), folder), request)


def test_a_right_candidate_has_a_ratio_for_each_bucket(tmp_path: Path) -> None:
    answer = measure(source(), tmp_path)
    assert answer["worst"] == 0.0
    assert len(answer["ratios"]) == 3
    assert all(ratio > 0 for ratio in answer["ratios"])


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ("torch.relu(x)", "differs by up to"),
        (f"({RIGHT}).t()", "shape [64, 32] for [32, 64]"),
        (f"({RIGHT})[:16]", "shape [16, 64] for [32, 64]"),
        (f"({RIGHT}) * float('nan')", "differs by up to nan"),
    ],
)
def test_another_shape_or_value_is_a_problem(result: str, problem: str, tmp_path: Path) -> None:
    answer = measure(source(result), tmp_path)
    assert list(answer) == ["problem"]
    assert problem in answer["problem"]


def test_half_the_precision_of_the_reference_passes_its_tolerance(tmp_path: Path) -> None:
    answer = measure(source(f"({RIGHT}) + 9e-3"), tmp_path)
    assert 8e-3 < answer["worst"] < 1e-2


def test_reference_and_candidate_get_the_same_input_objects_and_parameters(tmp_path: Path) -> None:
    with_parameter = REFERENCE.replace(
        "class Model(nn.Module):",
        "SEEN = []\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = nn.Parameter(torch.randn(64))",
    ).replace("return torch.relu(x) * 2 + 1", "SEEN.append(x)\n        return x * self.w")
    candidate = """
import sys
import torch
from torch import nn
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(64))
    def forward(self, x):
        references = [m for n, m in sys.modules.items() if isinstance(vars(m).get("SEEN"), list)]
        assert references and references[-1].SEEN
        return x * self.w if references[-1].SEEN[-1] is x or len(references[-1].SEEN) > 2 else x
"""
    assert measure(candidate, tmp_path, with_parameter)["worst"] == 0.0


def test_a_candidate_that_raises_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        measure(source("x.no_such_method()"), tmp_path)


def test_every_request_of_the_judge_is_served_too() -> None:
    handlers = dict(naive_worker.HANDLERS)
    assert handlers.pop("naive") is not None
    assert handlers == JUDGE_HANDLERS
