"""A kernel of its own is carried along and never launched; the work is done by the operators of eager.

Seen in 68 published entries as extensions that do not load, with a silent fallback. Every payload must be used by a step
(`contract`). A kernel that is launched for nothing is the variant `decor`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.adversarial.case import Case
from tests.adversarial.plans import V, candidate, op, product
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    19,
    "placebo",
    "laziness",
    expected="contract",
    status="closed",
    form="program",
    seen=("L1", "MK", "KG"),
    alone=True,
)


def reference() -> Region:
    return product()


def cheat() -> Candidate:
    return candidate(
        replace(product().program, payloads={"kernel": torch.zeros(64, dtype=torch.uint8)})
    )


def honest() -> Candidate:
    region = product()
    return candidate(replace(region.program, steps=(op("aten.mul.Tensor", V(1), V(0), out=2),)))
