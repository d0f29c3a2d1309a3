"""Test helper: a judge that answers at once with the verdicts that a test gives it."""

from __future__ import annotations

import functools

import torch
from torch import nn

from torch_cudal1 import judge
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.records import (
    Accepted,
    Candidate,
    CheckResult,
    Region,
    Rejected,
    Timing,
    Verdict,
)
from torch_cudal1.search.group_kernels import GroupKernels
from torch_cudal1.search.new_entry import store_checked_kernel
from torch_cudal1.search.space import SearchSpace, build_search_space
from torch_cudal1.store.context import TuneContext

CPU = torch.device("cpu")


PASSED = Verdict((CheckResult("numerics", True, 1.0, 2.0),))


class Reduced(nn.Module):
    """A reduction that a rewrite pushes through the product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum(-1)


def capture_region(module: nn.Module, *inputs: torch.Tensor) -> Region:
    with torch.no_grad():
        (region,) = capture_regions(module.eval(), inputs)
    return region


class ScriptedJudge:
    """A judge with verdicts by schedule: the lower bound of each schedule's speed-up, or a
    reason to refuse.
    """

    def __init__(self, verdicts: dict[str, float | str]) -> None:
        self.verdicts, self.evaluations = verdicts, 0

    def rank_baselines(self, region, schedules, job):
        return judge.BaselineRanking(
            Candidate(region.program, "eager", "baseline"), {"eager": 100.0, "inductor": 110.0}, {}
        )

    def evaluate_candidate(self, region, candidate, ranking, job):
        self.evaluations += 1
        verdict = self.verdicts[candidate.schedule]
        if isinstance(verdict, str):
            return judge.Evaluation(
                candidate, Rejected(verdict, "numerics"), Verdict((CheckResult("numerics", False),))
            )
        timing = Timing(PASSED, "eager", 100 / verdict, 100.0, verdict, verdict, verdict, 14)
        return judge.Evaluation(candidate, Accepted(timing), PASSED)


class TwoGroups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        return self.norm(torch.tanh(self.second(x)))


def build_group_kernels(place: TuneContext, job: judge.EvaluationConfig) -> GroupKernels:
    return GroupKernels(place, job, functools.partial(store_checked_kernel, place))


def build_space(region: Region, place: TuneContext, job: judge.EvaluationConfig) -> SearchSpace:
    return build_search_space(region, place, job, functools.partial(store_checked_kernel, place))
