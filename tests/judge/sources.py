"""A reference source, candidates made from it by changing a piece of text, and a bench that judges
them in fresh processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tests.adversarial.nursery import forked_children
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Check, Contract
from torch_cudal1.judge.checks import Detector
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.reference.source_reference import (
    PairSubject,
    SourceCandidate,
    read_reference,
)
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, limits_for

__all__ = ["FORWARD", "HEAD", "REFERENCE", "SourceBench", "source", "source_bench"]

CPU = torch.device("cpu")
HEAD = "import torch\nfrom torch import nn\n"
FORWARD = "torch.relu(self.linear(x))"
MODULE = """
class {entry}(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
{init}
    def forward(self, x):
{before}
        return {result}
"""
REFERENCE = (
    HEAD
    + MODULE.format(entry="Model", init="", before="        pass", result=FORWARD)
    + "\ndef get_inputs():\n    return [torch.randn(32, 64)]\n\ndef get_init_inputs():\n    return [64]\n"
)


def source(*, top: str = "", init: str = "", before: str = "pass", result: str = FORWARD) -> str:
    """The reference's module with statements at import, construction and call, and another result."""

    def indented(text: str) -> str:
        return "\n".join(f"        {line}" for line in text.splitlines())

    return (
        HEAD
        + top
        + MODULE.format(
            entry="ModelNew", init=indented(init), before=indented(before), result=result
        )
    )


@dataclass
class SourceBench:
    """One oracle for all; each candidate meets a process of its own."""

    subject: PairSubject
    examples: list[torch.Tensor]

    def checks(self, text: str, *detectors: Detector) -> list[Check]:
        """What the detectors say of a candidate, up to the first failed check. `numerics` draws the
        inputs most of them need.
        """
        candidate, terms = SourceCandidate(text), Contract()
        with Child(limits_for(Settings(), CPU), terms) as child:
            trial = Trial(self.subject, candidate, terms, CPU, child, self.examples)
            try:
                trial.load("candidate", candidate)
            except CandidateFailure as error:
                return [Check(error.detector, False, detail=error.found)]
            return list(validate(trial, detectors=detectors).checks)

    def last(self, text: str, *detectors: Detector) -> Check:
        """The check that decided."""
        return self.checks(text, *detectors)[-1]


@contextmanager
def source_bench(reference: str = REFERENCE) -> Iterator[SourceBench]:
    """A bench whose processes end with the block."""
    with forked_children(), Child(limits_for(Settings(), CPU), Contract()) as oracle:
        yield SourceBench(*read_reference(oracle, reference, CPU))
