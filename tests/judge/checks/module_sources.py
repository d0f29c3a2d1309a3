"""A reference module with parameters, buffers and modes, and drop-ins for it with one thing changed.

Each case says what a source does, which checks it meets after `numerics`, and which must refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.checks.module_semantics.parameters import PERTURB
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.profiles import PROFILES, ProfileName
from torch_cudal1.judge.reference.source_reference import SourceCandidate, SourceReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits

__all__ = ["FORWARD", "REFERENCE", "WEIGHT", "ModuleBench", "ModuleCase", "format_backward"]

# The parts of the source, the profile, the checks after `numerics`, and the one that must refuse it
# (None: it passes).
ModuleCase: TypeAlias = tuple[dict[str, str], ProfileName, tuple[CheckSpec, ...], str | None]

CPU = torch.device("cpu")
FORWARD = "functional.dropout(functional.leaky_relu(self.norm(self.linear(x + y)), self.slope), 0.5, self.training)"
# `forward` with a weight that is named `self.w`.
WEIGHT = "functional.leaky_relu(self.norm(functional.linear(x + y, self.w, self.linear.bias)), self.slope)"
MODULE = """
import random, threading, torch
from torch import nn
from torch.nn import functional
{top}
class {entry}(nn.Module):
    def __init__(self, features, slope):
        super().__init__()
        self.linear, self.norm, self.slope = nn.Linear(features, features), nn.BatchNorm1d(features), slope
{init}
    def plain(self, x, y):
        return {forward}
    def forward(self, x, y):
{before}
        return {result}
"""
ARGUMENTS = "def get_inputs(): return [torch.randn(8, 16), torch.randn(8, 16)]\ndef get_init_inputs(): return [16, 0.2]\n"
SINGLE = """
class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r): return r * 1
    @staticmethod
    {once}
    def backward(ctx, g): return {backward}
"""


def make_module(entry: str = "ModelNew", **parts: str) -> str:
    """A drop-in for the reference, with statements at import, construction and call, and another
    result.
    """

    def indent(text: str) -> str:
        return "\n".join(f"        {line}" for line in (text or "pass").splitlines())

    fields = {
        "top": "",
        "init": "",
        "before": "",
        "result": "self.plain(x, y)",
        "forward": FORWARD,
    } | parts
    fields |= {name: indent(fields[name]) for name in ("init", "before")}
    return MODULE.format(entry=entry, **fields)


REFERENCE = make_module(entry="Model") + ARGUMENTS


def format_backward(backward: str, once: str = "") -> str:
    """An autograd function `Same` with this gradient; `once`: a decorator of its backward."""
    return SINGLE.format(once=once, backward=backward)


def _draw_sets(trial: Trial) -> list[CheckResult]:
    """Draw the input sets that the checks read, and compare nothing."""
    return [
        CheckResult(
            "sets",
            len({trial.draw("normal").name, trial.draw("shifted").name}) == 2,
            detail="drawn",
        )
    ]


def _run_fast_numerics(trial: Trial) -> list[CheckResult]:
    """The results that other checks read, without the eight seeds of the thorough profiles."""
    profile, trial.profile = trial.profile, PROFILES["fast"]
    try:
        return NUMERICS.run(trial)
    finally:
        trial.profile = profile


FAST_NUMERICS = replace(NUMERICS, run=_run_fast_numerics)
SETS = CheckSpec(name="sets", run=_draw_sets, asks="nothing")
# 50 steps of descent instead of 200.
SHORT_PROFILES = PROFILES | {"strict": replace(PROFILES["strict"], descent=50)}


@dataclass(frozen=True)
class ModuleBench:
    """Judges drop-ins for `REFERENCE`, each in a process of its own."""

    reference: SourceReference
    examples: list[torch.Tensor]

    def run_checks(
        self, text: str, profile: ProfileName, checks: tuple[CheckSpec, ...]
    ) -> list[CheckResult]:
        """The results of these checks, up to the first that failed."""
        with Child(make_limits(Settings(), CPU), Contract()) as child:
            trial = Trial(
                self.reference, SourceCandidate(text), Contract(), CPU, child, self.examples
            )
            try:
                trial.load("candidate", trial.candidate)
            except CandidateFailure as error:
                return [CheckResult(error.detector, False, detail=error.found)]
            first = SETS if checks == (PERTURB,) else FAST_NUMERICS
            return list(validate(trial, SHORT_PROFILES[profile], checks=(first, *checks)).checks)

    def assert_verdict(self, case: ModuleCase) -> None:
        """Raise AssertionError unless the source of a case is refused, or passes, as it says."""
        parts, profile, checks, expected = case
        results = self.run_checks(make_module(**parts), profile, checks)
        refused = [check for check in results if not check.passed]
        assert (refused[0].name if refused else None) == expected, refused or results
        assert all(check.detail or check.value is not None for check in results)
