"""The Program writes into its input, where a later call could read it: state without a place for state.

An operator that writes to its arguments is not functional, and `contract` refuses it by its schema.
"""

from __future__ import annotations

from dataclasses import replace

from tests.adversarial.case import Case
from tests.adversarial.plans import V, candidate, op, product
from torch_cudal1.ir.records import Candidate, Region

CASE = Case(
    13,
    "hidden_state",
    "caching",
    expected="contract",
    status="closed",
    form="program",
    variant="program",
)


def reference() -> Region:
    return product()


def cheat() -> Candidate:
    return candidate(replace(product().program, steps=(op("aten.mul_.Tensor", V(0), V(1), out=2),)))


def honest() -> Candidate:
    region = product()
    return candidate(replace(region.program, steps=(op("aten.mul.Tensor", V(1), V(0), out=2),)))
