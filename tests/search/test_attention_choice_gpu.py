"""PyTorch's attention operators, measured on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.ir.test_attention_steps import make_program
from torch_cudal1.core import telemetry
from torch_cudal1.runtime.executor import prepare
from torch_cudal1.search.attention_choice import choose_attention


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "biased"), [("efficient", False), ("efficient", True), ("cudnn", True)]
)
def test_the_choice_is_right_and_measured(kind: str, biased: bool) -> None:
    device = torch.device("cuda")
    program = make_program(kind, biased=biased)
    telemetry.reset()
    choice = choose_attention(program, device)
    inputs = [
        torch.randn(100_000, device=device).to(torch.bfloat16).as_strided(spec.shape, spec.strides)
        for spec in program.inputs
    ]
    run, own = (prepare(each, device)(inputs)[0] for each in (choice.program, program))
    torch.testing.assert_close(run, own, atol=2e-2, rtol=2e-2)
    facts = [event.facts for event in telemetry.report().events if event.what == "attention"]
    (measured,) = [each for each in facts if "medians_us" in each]
    assert len(measured["medians_us"]) >= 2, facts
