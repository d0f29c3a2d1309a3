"""The Program returns the memory of a constant: one buffer for all calls.

The Program form of a kept output. Every output must be computed by the call itself (`contract`): an allocation, or the view
that eager returns too.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.adversarial.case import Case
from tests.adversarial.plans import V, candidate, op, spec
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    33,
    "persistent_output",
    "state",
    expected="contract",
    status="closed",
    form="program",
    variant="constant",
    seen=("L1",),
)


def reference() -> Region:
    zeros = torch.zeros(64, 64)
    steps = (op("aten.mul.Tensor", V(0), V(2), out=3), op("aten.add.Tensor", V(3), V(2), out=4))
    return Region(
        Program((spec(64, 64), spec(64, 64)), steps, (4,), ("zeros",), {"zeros": zeros}),
        ("input", "input"),
    )


def cheat() -> Candidate:
    return candidate(replace(reference().program, steps=(), outputs=(2,)))


def honest() -> Candidate:
    return candidate(
        replace(
            reference().program,
            steps=(op("aten.addcmul.default", V(2), V(0), V(2), out=3),),
            outputs=(3,),
        )
    )
