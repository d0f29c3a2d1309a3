"""A reference source, candidates made from it by changing a piece of text, and a bench that judges
them in fresh processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch

from tests.adversarial.fork_server import fork_children
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.reference.source_reference import (
    SourceCandidate,
    SourceReference,
    read_reference,
)
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits

__all__ = [
    "FORWARD",
    "HEAD",
    "REFERENCE",
    "SourceBench",
    "SourceCase",
    "source",
    "source_bench",
]

# The statements of a source, the checks that follow `numerics`, the one that must refuse it (None:
# it passes), and a word of the reason.
SourceCase: TypeAlias = tuple[dict[str, str], tuple[CheckSpec, ...], str | None, str]

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

    def indent(text: str) -> str:
        return "\n".join(f"        {line}" for line in text.splitlines())

    return (
        HEAD
        + top
        + MODULE.format(entry="ModelNew", init=indent(init), before=indent(before), result=result)
    )


@dataclass
class SourceBench:
    """One oracle for all; each candidate meets a process of its own."""

    reference: SourceReference
    examples: list[torch.Tensor]

    def checks(self, text: str, *detectors: CheckSpec) -> list[CheckResult]:
        """What the detectors say of a candidate, up to the first failed check. `numerics` draws the
        inputs most of them need.
        """
        candidate, terms = SourceCandidate(text), Contract()
        with Child(make_limits(Settings(), CPU), terms) as child:
            trial = Trial(self.reference, candidate, terms, CPU, child, self.examples)
            try:
                trial.load("candidate", candidate)
            except CandidateFailure as error:
                return [CheckResult(error.detector, False, detail=error.found)]
            return list(validate(trial, checks=detectors).checks)

    def last(self, text: str, *detectors: CheckSpec) -> CheckResult:
        """The check that decided."""
        return self.checks(text, *detectors)[-1]

    def assert_verdict(self, case: SourceCase) -> None:
        """Raise AssertionError unless the source of a case is refused, or passes, as it says."""
        parts, detectors, refused, word = case
        check = self.last(source(**parts), NUMERICS, *detectors)
        assert check.passed == (refused is None), check
        if refused:
            assert check.name == refused, check
            assert word in check.detail, check


@contextmanager
def source_bench(reference: str = REFERENCE) -> Iterator[SourceBench]:
    """A bench whose processes end with the block."""
    with fork_children(), Child(make_limits(Settings(), CPU), Contract()) as oracle:
        yield SourceBench(*read_reference(oracle, reference, CPU))
