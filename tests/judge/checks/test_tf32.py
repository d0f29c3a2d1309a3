"""TF32 is used in the classes of operators that have the right to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.judge.checks.program_bench import get_last
from tests.judge.programs import V, candidate, op, spec, subject
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Contract, Region
from torch_cudal1.judge.checks.history import CALL_HISTORY, REPEAT
from torch_cudal1.judge.checks.layouts import LAYOUTS, SHAPES
from torch_cudal1.judge.checks.module_semantics.parameters import PERTURB
from torch_cudal1.judge.checks.module_semantics.updates import UPDATE_PATH
from torch_cudal1.judge.checks.negative_controls import IMPOSTOR
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.special_values import SPECIAL
from torch_cudal1.judge.checks.tf32 import make_exact_for_class
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.profiles import PROFILES
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child

CPU = torch.device("cpu")


def test_one_class_of_operators_is_made_exact_and_the_other_left() -> None:
    program = Program(
        (spec(2, 3, 8, 8), spec(4, 3, 3, 3), spec(4, 4)),
        (op("aten.clone.default", V(0), out=3),),
        (3,),
    )
    trial = Trial(
        subject(Region(program, ("input", "parameter", "parameter"))),
        candidate(program),
        Contract(),
        CPU,
        None,
    )  # type: ignore[arg-type]
    plain, kernel, matrix = make_exact_for_class(trial, "conv")
    assert plain is not None
    assert kernel is not None
    assert matrix is not None
    assert {*plain.unique().tolist(), *kernel.unique().tolist()} == {0.0, 1.0}
    assert len(matrix.unique()) == 16


CONVOLVED = Region(
    Program(
        (spec(4, 8, 14, 14), spec(16, 8, 3, 3), spec(16)),
        (
            op(
                "aten.convolution.default",
                V(0),
                V(1),
                V(2),
                (1, 1),
                (1, 1),
                (1, 1),
                False,
                (0, 0),
                1,
                out=3,
            ),
            op("aten.relu.default", V(3), out=4),
        ),
        (4,),
    ),
    ("input", "parameter", "parameter"),
)


def convolve_in_tf32() -> Program:
    """Both operands rounded to 11 bits (Veltkamp's splitting; infinities as they are), then
    multiplied as ever.
    """
    steps = []
    for operand, first in ((0, 3), (1, 8)):
        wide, rest, high, lost, rounded = range(first, first + 5)
        steps += [
            op("aten.mul.Scalar", V(operand), 8193.0, out=wide),
            op("aten.sub.Tensor", V(operand), V(wide), out=rest),
            op("aten.add.Tensor", V(wide), V(rest), out=high),
            op("aten.isnan.default", V(high), out=lost),
            op("aten.where.self", V(lost), V(operand), V(high), out=rounded),
        ]
    steps += [
        op(
            "aten.convolution.default",
            V(7),
            V(12),
            V(2),
            (1, 1),
            (1, 1),
            (1, 1),
            False,
            (0, 0),
            1,
            out=13,
        ),
        op("aten.relu.default", V(13), out=14),
    ]
    return replace(CONVOLVED.program, steps=tuple(steps), outputs=(14,))


@pytest.mark.parametrize(
    ("contract", "passes"),
    [
        (Contract("match", ("conv",)), True),
        (Contract("match", ("matmul",)), False),
        (Contract("strict", ("conv",)), False),
        (Contract(), False),
    ],
)
def test_tf32_that_eager_does_not_use_passes_every_check_of_values_with_the_right_and_none_without(
    child: Child, contract: Contract, passes: bool
) -> None:
    trial = Trial(
        subject(CONVOLVED, contract),
        candidate(convolve_in_tf32()),
        contract,
        CPU,
        child,
        profile=PROFILES["standard"],
    )
    trial.load("candidate", trial.candidate)
    checks_of_values = (
        NUMERICS,
        IMPOSTOR,
        PERTURB,
        UPDATE_PATH,
        SHAPES,
        LAYOUTS,
        SPECIAL,
        CALL_HISTORY,
        REPEAT,
    )
    checks = list(validate(trial, checks=checks_of_values).checks)
    trial.drop(*list(trial.samples.values()))
    assert get_last(checks).passed is passes, get_last(checks)
    assert any("makes no use" in check.detail for check in checks) is passes
    if not passes:
        assert get_last(checks).name == "numerics"
