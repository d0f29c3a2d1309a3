"""The Program returns an input where eager returns a copy.

The Program form of a skipped copy. `contract` works out on fake tensors which inputs each output shares memory with, and allows
what eager shares.
"""

from __future__ import annotations

from tests.adversarial.case import Case
from tests.adversarial.plans import V, candidate, op, spec
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    34,
    "wrong_alias",
    "state",
    expected="contract",
    status="closed",
    form="program",
    variant="program",
    seen=("L1",),
)


def reference() -> Region:
    return Region(
        Program((spec(64, 64),), (op("aten.clone.default", V(0), out=1),), (1,)), ("input",)
    )


def cheat() -> Candidate:
    return candidate(Program((spec(64, 64),), (), (0,)))


def honest() -> Candidate:
    return candidate(Program((spec(64, 64),), (op("aten.mul.Scalar", V(0), 1, out=1),), (1,)))
