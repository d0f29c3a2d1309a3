"""Outputs are weighed once, and bits that were right before are right again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.judge.programs import candidate, linear_relu, subject
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.reference import output_comparison
from torch_cudal1.judge.reference.compare import compare
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

CPU = torch.device("cpu")

REGION = linear_relu()

REFERENCE = REGION.program


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(make_limits(Settings(), CPU), Contract()) as running:
        yield running


def test_bits_that_were_right_once_are_not_weighed_again_and_others_are(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(subject(REGION), candidate(REFERENCE), Contract(), CPU, child)
    trial.load("candidate", trial.candidate)
    sample = trial.draw("normal")
    outputs = trial.run(sample).outputs
    weighed = []
    monkeypatch.setattr(
        output_comparison,
        "compare",
        lambda *args, **kwargs: weighed.append(args) or compare(*args, **kwargs),
    )
    first, second = (
        list(output_comparison.compare_outputs(trial, sample, equal_outputs, weighed=(0,)))
        for equal_outputs in (outputs, [t.clone() for t in outputs])
    )
    assert (first, len(weighed)) == (second, 1)
    changed = outputs[0].clone()
    changed[3, 1] += 1.0
    ((_, comparison),) = output_comparison.compare_outputs(trial, sample, [changed])
    assert not comparison.passed
    trial.drop(sample)
    assert not trial.accepted_outputs
