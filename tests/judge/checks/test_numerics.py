"""Results are compared on secret inputs, and those that must be exact are exact."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.judge.checks.program_bench import (
    ADDMM,
    LARGEST,
    REGION,
    TRANSPOSE,
    ProgramChecker,
    get_last,
)
from tests.judge.programs import V, candidate, op, subject
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.profiles import PROFILES
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child

CPU = torch.device("cpu")


def test_sums_of_small_integers_must_be_exact(child: Child) -> None:
    steps = (
        TRANSPOSE,
        ADDMM,
        op("aten.add.Scalar", V(4), 3e-7, out=5),
        op("aten.relu.default", V(5), out=6),
    )
    off = replace(REGION.program, steps=steps, outputs=(6,))
    for program, passed in ((REGION.program, True), (off, False)):
        trial = Trial(subject(REGION), candidate(program), Contract(), CPU, child)
        trial.profile = replace(PROFILES["strict"], distributions=("integers", "shifted"), seeds=1)
        trial.load("candidate", candidate(program))
        assert NUMERICS.run(trial)[-1].passed is passed
        trial.drop(*list(trial.samples.values()))


def test_an_index_of_another_value_than_the_largest_is_wrong(check_program: ProgramChecker) -> None:
    smallest = replace(LARGEST.program, steps=(op("aten.argmin.default", V(0), 1, out=1),))
    assert not get_last(check_program(LARGEST, smallest, "fast")).passed
    assert get_last(check_program(LARGEST, LARGEST.program, "fast")).passed
