"""What the detectors of state and values do with Programs: attacks, twins that pass, and what does
not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.judge.programs import V, candidate, linear_relu, op, spec, subject
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import CheckResult, Contract, Region
from torch_cudal1.judge.checks.history import CALL_HISTORY, REPEAT
from torch_cudal1.judge.checks.layouts import DTYPES, LAYOUTS, SHAPES
from torch_cudal1.judge.checks.module_semantics.gradients import GRAD
from torch_cudal1.judge.checks.module_semantics.modes import MODE, STATE_DICT
from torch_cudal1.judge.checks.module_semantics.parameters import PERTURB, SCALARS, UPDATE_PATH
from torch_cudal1.judge.checks.negative_controls import IMPOSTOR
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.registry import PROTOCOL, select_checks
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.special_values import SPECIAL
from torch_cudal1.judge.checks.tf32 import RIGHTS, make_exact_for_class
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.profiles import ALL_DISTRIBUTIONS, PROFILES, ProfileName, profile_for
from torch_cudal1.judge.reference.compare import compare, compare_tied_indices
from torch_cudal1.judge.reference.inputs import DISTRIBUTIONS, make_inputs
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

CPU = torch.device("cpu")
REGION = linear_relu()
TRANSPOSE, ADDMM, _ = REGION.program.steps
SCALE = Region(
    Program((spec(16, 64),), (op("aten.mul.Scalar", V(0), 3.0, out=1),), (1,)),
    ("input",),
    name="scale",
)
COPY = Region(Program((spec(16, 64),), (op("aten.clone.default", V(0), out=1),), (1,)), ("input",))
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
Judge = Callable[..., list[CheckResult]]


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(make_limits(Settings(), CPU), Contract()) as running:
        yield running


@pytest.fixture
def judged(child: Child) -> Judge:
    def run(
        region: Region, program: Program, profile: ProfileName, *detectors: CheckSpec
    ) -> list[CheckResult]:
        trial = Trial(
            subject(region), candidate(program), Contract(), CPU, child, profile=PROFILES[profile]
        )
        trial.load("candidate", candidate(program))
        checks = list(validate(trial, checks=(NUMERICS, *detectors)).checks)
        trial.drop(*list(trial.samples.values()))
        return checks

    return run


def last(checks: list[CheckResult]) -> CheckResult:
    return checks[-1]


def flushed() -> Program:
    """Right but for denormals."""
    tiny = (op("aten.abs.default", V(0), out=1), op("aten.lt.Scalar", V(1), 1e-38, out=2))
    steps = (
        *tiny,
        op("aten.masked_fill.Scalar", V(0), V(2), 0.0, out=3),
        op("aten.mul.Scalar", V(3), 3.0, out=4),
    )
    return replace(SCALE.program, steps=steps, outputs=(4,))


def through_float16() -> Program:
    steps = (
        op("aten._to_copy.default", V(0), dtype=torch.float16, out=1),
        op("aten._to_copy.default", V(1), dtype=torch.float32, out=2),
        op("aten.mul.Scalar", V(2), 3.0, out=3),
    )
    return replace(SCALE.program, steps=steps, outputs=(3,))


def unsigned_zeros() -> Program:
    return replace(COPY.program, steps=(op("aten.add.Scalar", V(0), 0.0, out=1),), outputs=(1,))


@pytest.mark.parametrize(
    ("region", "attack", "detector", "word"),
    [
        (SCALE, flushed, "special", "denormals"),
        (SCALE, through_float16, "numerics", "normal"),
        (COPY, unsigned_zeros, "special", "other sign"),
    ],
)
def test_values_that_fast_arithmetic_gets_wrong_are_asked(
    judged: Judge, region: Region, attack: Callable[[], Program], detector: str, word: str
) -> None:
    check = last(judged(region, attack(), "standard", SPECIAL))
    assert (check.passed, check.name) == (False, detector)
    assert word in check.detail
    assert last(judged(region, region.program, "standard", SPECIAL)).passed


def test_the_kill_matrix_counts_and_names_what_cannot_be_seen(judged: Judge) -> None:
    """Some draws of inputs show even that parameter, by rounding alone."""
    for _ in range(4):
        check = last(judged(CENTRED, CENTRED.program, "standard", IMPOSTOR))
        assert check.passed
        assert "parameter 1 zeroed" in check.detail
        assert check.limit == 19
        if "unobservable: parameter 1 zeroed" in check.detail:
            break
    assert "unobservable: parameter 1 zeroed" in check.detail
    assert check.value == 18
    everything = last(judged(REGION, REGION.program, "standard", IMPOSTOR))
    assert everything.value == everything.limit


def test_a_parameter_that_does_not_matter_is_recorded_and_one_that_does_must_move_the_result(
    judged: Judge,
) -> None:
    assert (
        "unobservable: parameter 1"
        in last(judged(CENTRED, CENTRED.program, "fast", PERTURB)).detail
    )
    moved = last(judged(REGION, REGION.program, "fast", PERTURB))
    assert moved.passed
    assert "2 of 2" in moved.detail
    assert moved.value is not None


def test_a_change_that_rounding_hides_is_found_where_the_bias_dominates(judged: Judge) -> None:
    """In bfloat16 a bias is lost among inputs of size 1e4, not among small ones."""
    region = linear_relu(torch.bfloat16)
    assert "unobservable" not in last(judged(region, region.program, "fast", PERTURB)).detail


def test_other_parameters_at_the_same_and_at_other_addresses_are_read(judged: Judge) -> None:
    check = last(judged(REGION, REGION.program, "fast", UPDATE_PATH))
    assert check.passed
    assert "same addresses" in check.detail


@pytest.mark.parametrize(
    "detector", [SHAPES, LAYOUTS, DTYPES, SCALARS, GRAD, MODE, STATE_DICT, RIGHTS]
)
def test_what_a_program_cannot_do_is_said(judged: Judge, detector: CheckSpec) -> None:
    check = last(judged(REGION, REGION.program, "standard", detector))
    assert check.passed
    assert check.detail.startswith("not applicable: ")


def test_indices_may_differ_only_between_equal_values(judged: Judge) -> None:
    values = torch.tensor([[1.0, 3.0, 3.0 + 1e-12, 2.0]], dtype=torch.float64)
    first, second, third = (torch.tensor([index]) for index in (1, 2, 3))
    assert compare_tied_indices(first, second, values, 1).passed
    assert not compare_tied_indices(third, second, values, 1).passed
    assert not compare_tied_indices(
        torch.tensor([[1, 1]]), torch.tensor([[2, 1]]), values, 1
    ).passed
    smallest = replace(LARGEST.program, steps=(op("aten.argmin.default", V(0), 1, out=1),))
    assert not last(judged(LARGEST, smallest, "fast")).passed
    assert last(judged(LARGEST, LARGEST.program, "fast")).passed


def test_sums_of_small_integers_must_be_exact(judged: Judge, child: Child) -> None:
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


def test_a_few_large_errors_say_less_than_many_small_ones() -> None:
    """2.5 times eager's error is chance where two elements make up the whole, and a loss of
    precision where all do.
    """
    generator = torch.Generator().manual_seed(5)
    eager = torch.randn(8_192, generator=generator)
    errors = 1e-4 * torch.randn(8_192, generator=generator, dtype=torch.float64)
    few = torch.where(torch.arange(8_192) < 2, errors, 1e-6 * errors)
    for error, passed in ((few, True), (errors, False)):
        exact = eager.double() - error
        assert compare((exact + 2.5 * error).float(), eager, exact).passed is passed


@pytest.mark.parametrize(
    ("distribution", "holds"),
    [
        ("log_uniform", lambda x: float(x.abs().max()) > 1e5 and float(x.abs().min()) < 1e-5),
        ("thousand", lambda x: abs(float(x.mean()) - 1000) < 1),
        ("impulse", lambda x: int((x != 0).sum()) == 1),
        ("constant_rows", lambda x: torch.equal(x, x[:, :1].expand_as(x))),
        ("sorted", lambda x: bool((x.diff(dim=1) >= 0).all())),
        ("sparse", lambda x: 0.85 < float((x == 0).float().mean()) < 0.95),
        ("integers", lambda x: set(x.unique().tolist()) == {0.0, 1.0}),
    ],
)
def test_a_structured_distribution_has_its_structure(
    distribution: str, holds: Callable[[torch.Tensor], bool]
) -> None:
    form = subject(Region(replace(SCALE.program, inputs=(spec(64, 256),)), ("input",)))
    (made,) = make_inputs(form, 3, distribution, CPU)
    assert holds(made)


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


def test_profiles_grow_and_ask_in_the_same_order() -> None:
    asked = [select_checks(PROFILES[name]) for name in ("fast", "standard", "strict")]
    for less, more in pairwise(asked):
        assert [detector for detector in more if detector in less] == list(less)
    assert asked[-1] == PROTOCOL
    assert set(ALL_DISTRIBUTIONS) == set(DISTRIBUTIONS)
    assert [profile_for(name).name for name in ("train", "cudal1", "strict")] == [
        "fast",
        "fast",
        "strict",
    ]
    with pytest.raises(ValueError, match="distributions"):
        replace(PROFILES["fast"], distributions=("no such",))


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


def in_tf32() -> Program:
    """Both operands rounded to 11 bits (Veltkamp's splitting; infinities as they are), then
    multiplied as ever.
    """
    steps = []
    for operand, first in ((0, 3), (1, 8)):
        wide, rest, high, lost, whole = range(first, first + 5)
        steps += [
            op("aten.mul.Scalar", V(operand), 8193.0, out=wide),
            op("aten.sub.Tensor", V(operand), V(wide), out=rest),
            op("aten.add.Tensor", V(wide), V(rest), out=high),
            op("aten.isnan.default", V(high), out=lost),
            op("aten.where.self", V(lost), V(operand), V(high), out=whole),
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
def test_tf32_where_eager_leaves_that_right_unused_passes_every_detector_of_values_and_none_without_the_right(
    child: Child, contract: Contract, passes: bool
) -> None:
    trial = Trial(
        subject(CONVOLVED, contract),
        candidate(in_tf32()),
        contract,
        CPU,
        child,
        profile=PROFILES["standard"],
    )
    trial.load("candidate", trial.candidate)
    asked = (
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
    checks = list(validate(trial, checks=asked).checks)
    trial.drop(*list(trial.samples.values()))
    assert last(checks).passed is passes, last(checks)
    assert any("makes no use" in check.detail for check in checks) is passes
    if not passes:
        assert last(checks).name == "numerics"
