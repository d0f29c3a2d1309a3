"""The Program carries the result as a constant and returns it.

The Program form of a precomputed table. A constant must be the reference's own, or come with a rule that recomputes it
(`contract`); nothing is run. There is no other place in a Program to keep a result.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.adversarial.case import Case
from tests.adversarial.plans import V, candidate, op, product
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    12,
    "seed_oracle",
    "caching",
    expected="contract",
    status="closed",
    form="program",
    variant="payload",
    seen=("GM", "KG"),
)


def reference() -> Region:
    return product()


def cheat() -> Candidate:
    region = product()
    payload = torch.randn(64, 64)
    return candidate(
        Program(
            region.program.inputs,
            (op("aten.clone.default", V(2), out=3),),
            (3,),
            ("kept",),
            {"kept": payload},
        )
    )


def honest() -> Candidate:
    region = product()
    return candidate(replace(region.program, steps=(op("aten.mul.Tensor", V(1), V(0), out=2),)))
