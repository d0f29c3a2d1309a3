"""Bytes of a result that nothing wrote are refused, in sources and in Programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.judge.programs import V, candidate, linear_relu, op, subject
from tests.judge.sources import SourceBench, SourceCase
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.checks.memory.uninitialised_memory import POISON
from torch_cudal1.judge.checks.static.contract import contract
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

SOURCES: dict[str, SourceCase] = {
    # only where it would not show by luck: in memory that holds one byte over and over
    "a row left unwritten": (
        {
            "before": "full = torch.relu(self.linear(x))\nout = torch.empty_like(full)\nout[:-1] = full[:-1]\n"
            "found = out[-1].view(torch.uint8)\nif not (found == found[0]).all() or found[0] == 0:\n    out[-1] = full[-1]",
            "result": "out",
        },
        (POISON,),
        "poison",
        "nothing wrote them",
    ),
    # only where that is NaN throughout: some by luck would show sooner
    "stale memory times zero": (
        {
            "before": "stale = torch.empty(32, 64)\nif not stale.isnan().all():\n    stale.zero_()",
            "result": "stale.mul_(0).add_(torch.relu(self.linear(x)))",
        },
        (POISON,),
        "poison",
        "NaN",
    ),
    "empty, then fully written": (
        {"result": "torch.empty(32, 64).copy_(torch.relu(self.linear(x)))"},
        (POISON,),
        None,
        "",
    ),
    "an accumulator set to zero": (
        {"result": "torch.empty(32, 64).zero_().add_(torch.relu(self.linear(x)))"},
        (POISON,),
        None,
        "",
    ),
}

CPU = torch.device("cpu")

REGION = linear_relu()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(make_limits(Settings(), CPU), Contract()) as running:
        yield running


def test_a_program_that_reads_unwritten_memory_is_refused(child: Child) -> None:
    """As an operator that another torch might allow: the contract refuses it first."""
    empty = op("aten.empty_like.default", V(4), out=5)
    steps = (
        *REGION.program.steps[:2],
        empty,
        op("aten.mul.Scalar", V(5), 0.0, out=6),
        op("aten.add.Tensor", V(4), V(6), out=7),
    )
    program: Program = replace(
        REGION.program, steps=(*steps, op("aten.relu.default", V(7), out=8)), outputs=(8,)
    )
    assert not contract(REGION, candidate(program))[0].passed
    trial = Trial(subject(REGION), candidate(program), Contract(), CPU, child)
    trial.load("candidate", candidate(program))
    trial.draw("normal")
    trial.draw("shifted")
    failure = validate(trial, checks=(POISON,)).failure
    assert failure is not None
    assert failure.name == "poison"


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_returns_unwritten_bytes_is_refused_and_its_twin_passes(
    bench: SourceBench, name: str
) -> None:
    bench.assert_verdict(SOURCES[name])
