"""The Program's result is half precision, eager's is single.

`contract` works dtype, shape and device of every output out on fake tensors; nothing is run.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.adversarial.case import Case
from tests.adversarial.plans import V, candidate, op, product
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    21,
    "dtype_changed",
    "numerics",
    expected="contract",
    status="closed",
    form="program",
    variant="program",
    seen=("L1",),
)


def reference() -> Region:
    return product()


def cheat() -> Candidate:
    narrow = op("aten._to_copy.default", V(2), dtype=torch.float16, out=3)
    return candidate(
        replace(product().program, steps=(*product().program.steps, narrow), outputs=(3,))
    )


def honest() -> Candidate:
    wide = op("aten._to_copy.default", V(0), dtype=torch.float64, out=2)
    steps = (
        wide,
        op("aten.mul.Tensor", V(2), V(1), out=3),
        op("aten._to_copy.default", V(3), dtype=torch.float32, out=4),
    )
    return candidate(replace(product().program, steps=steps, outputs=(4,)))
