"""Regions with one property each, for checks of Programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tests.judge.programs import V, linear_relu, op, spec
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import CheckResult, Region

REGION = linear_relu()
TRANSPOSE, ADDMM, _ = REGION.program.steps
SCALE = Region(
    Program((spec(16, 64),), (op("aten.mul.Scalar", V(0), 3.0, out=1),), (1,)),
    ("input",),
    name="scale",
)
CENTRED = Region(  # relu(x + b - mean(x + b)): a bias of one number cannot be seen
    Program(
        (spec(16, 64), spec(1)),
        (
            op("aten.add.Tensor", V(0), V(1), out=2),
            op("aten.mean.dim", V(2), (1,), True, out=3),
            op("aten.sub.Tensor", V(2), V(3), out=4),
        ),
        (4,),
    ),
    ("input", "parameter"),
)
LARGEST = Region(
    Program((spec(16, 64),), (op("aten.argmax.default", V(0), 1, out=1),), (1,)), ("input",)
)

# Region, Program, profile, checks after `numerics` -> results, up to the first that failed.
ProgramChecker: TypeAlias = Callable[..., list[CheckResult]]


def get_last(checks: list[CheckResult]) -> CheckResult:
    """The check that decided."""
    return checks[-1]
