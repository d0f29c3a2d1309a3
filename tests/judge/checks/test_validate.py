"""Every check stops its attack on a Program, and the honest twin beside it passes. One child serves the whole file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.judge.checks.module_sources import ModuleBench
from tests.judge.programs import OUT, V, candidate, linear_relu, op, spec, subject, with_steps
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Program, TensorSpec
from torch_cudal1.ir.records import Contract, Region, Verdict
from torch_cudal1.judge.checks.history import CALL_HISTORY, REPEAT
from torch_cudal1.judge.checks.layouts import LAYOUTS, SHAPES
from torch_cudal1.judge.checks.memory.dead_launches import GHOST
from torch_cudal1.judge.checks.memory.fresh_outputs import FRESH_OUTPUT
from torch_cudal1.judge.checks.memory.redzones import GUARD_BAND, GUARD_PAGE
from torch_cudal1.judge.checks.memory.uninitialised_memory import POISON
from torch_cudal1.judge.checks.module_semantics.gradients import GRAD
from torch_cudal1.judge.checks.module_semantics.modes import STATE_DICT
from torch_cudal1.judge.checks.module_semantics.parameters import PERTURB
from torch_cudal1.judge.checks.module_semantics.scalars import SCALARS
from torch_cudal1.judge.checks.module_semantics.updates import UPDATE_PATH
from torch_cudal1.judge.checks.negative_controls import IMPOSTOR
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.process import ISOLATION, RESOURCE
from torch_cudal1.judge.checks.special_values import SPECIAL
from torch_cudal1.judge.checks.static.contract import contract
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

CPU = torch.device("cpu")

REGION = linear_relu()

REFERENCE = REGION.program

TRANSPOSE, ADDMM, RELU = REFERENCE.steps

ProtocolRun = Callable[..., Verdict]


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(make_limits(Settings(), CPU), Contract()) as running:
        yield running


@pytest.fixture
def run_protocol(child: Child) -> ProtocolRun:
    def run(
        program: Program,
        region: Region = REGION,
        terms: Contract | None = None,
        checks: object = None,
    ) -> Verdict:
        static = contract(region, candidate(program))
        if not all(check.passed for check in static):
            return Verdict(tuple(static))
        trial = Trial(subject(region, terms), candidate(program), terms or Contract(), CPU, child)
        trial.load("candidate", candidate(program))
        verdict = Verdict((*static, *validate(trial, checks=checks).checks))  # type: ignore[arg-type]
        trial.drop(*list(trial.samples.values()))
        return verdict

    return run


def mm_relu(*before: object) -> Program:
    return with_steps(REGION, TRANSPOSE, op("aten.mm.default", V(0), V(3), out=4), RELU, output=5)


def through_bfloat16() -> Program:
    narrow = op("aten._to_copy.default", V(0), dtype=torch.bfloat16, out=4)
    back = op("aten._to_copy.default", V(4), dtype=torch.float32, out=5)
    product = op("aten.addmm.default", V(2), V(5), V(3), out=6)
    return with_steps(
        REGION, TRANSPOSE, narrow, back, product, op("aten.relu.default", V(6), out=7), output=7
    )


def first_shape_only() -> Program:
    """Right for the first half of the batch; the other rows repeat it."""
    half = op("aten.slice.Tensor", V(0), 0, 0, 16, out=4)
    twice = op("aten.cat.default", (V(4), V(4)), out=5)
    product = op("aten.addmm.default", V(2), V(5), V(3), out=6)
    return with_steps(
        REGION, TRANSPOSE, half, twice, product, op("aten.relu.default", V(6), out=7), output=7
    )


def replay_a_constant() -> Program:
    stored = torch.relu(torch.randn(32, OUT))
    return Program(
        REFERENCE.inputs,
        (op("aten.clone.default", V(3), out=4),),
        (4,),
        ("stored",),
        {"stored": stored},
    )


def zeros() -> Program:
    return with_steps(
        REGION,
        op("aten.full.default", (32, OUT), 0.0, dtype=torch.float32, device=CPU, out=3),
        output=3,
    )


def swallow_nan() -> Program:
    clean = op("aten.nan_to_num.default", V(4), 0.0, out=5)
    return with_steps(
        REGION, TRANSPOSE, ADDMM, clean, op("aten.relu.default", V(5), out=6), output=6
    )


def wrong_scale() -> Program:
    return with_steps(
        REGION, TRANSPOSE, ADDMM, RELU, op("aten.mul.Scalar", V(5), 1.00001, out=6), output=6
    )


def constant_as_output() -> Program:
    """An output that lives longer than the call: the payload itself."""
    return Program(
        REFERENCE.inputs, (), (3,), ("stored",), {"stored": torch.relu(torch.randn(32, OUT))}
    )


def wrong_shape() -> Program:
    return with_steps(
        REGION, TRANSPOSE, ADDMM, RELU, op("aten.slice.Tensor", V(5), 0, 0, 31, out=6), output=6
    )


def wrong_dtype() -> Program:
    return with_steps(
        REGION,
        TRANSPOSE,
        ADDMM,
        RELU,
        op("aten._to_copy.default", V(5), dtype=torch.float16, out=6),
        output=6,
    )


def wrong_strides() -> Program:
    flipped = (
        op("aten.t.default", V(5), out=6),
        op("aten.clone.default", V(6), memory_format=torch.contiguous_format, out=7),
    )
    return with_steps(
        REGION, TRANSPOSE, ADDMM, RELU, *flipped, op("aten.t.default", V(7), out=8), output=8
    )


def random_numbers() -> Program:
    noise = op("aten.rand_like.default", V(5), out=6)
    return with_steps(
        REGION, TRANSPOSE, ADDMM, RELU, noise, op("aten.mul.Tensor", V(6), 0.0, out=7), output=5
    )


def in_place() -> Program:
    return with_steps(
        REGION, TRANSPOSE, op("aten.addmm_.default", V(2), V(0), V(3), out=4), RELU, output=5
    )


ATTACKS = [
    (mm_relu, "numerics"),
    (through_bfloat16, "numerics"),
    (first_shape_only, "numerics"),
    (replay_a_constant, "contract"),
    (zeros, "numerics"),
    (wrong_scale, "numerics"),
    (swallow_nan, "special"),
    (constant_as_output, "contract"),
    (wrong_strides, "fresh_output"),
    (wrong_shape, "contract"),
    (wrong_dtype, "contract"),
    (random_numbers, "contract"),
]


@pytest.mark.parametrize(("attack", "detector"), ATTACKS)
def test_an_attack_is_stopped_by_its_detector(
    run_protocol: ProtocolRun, attack: Callable[[], Program], detector: str
) -> None:
    failure = run_protocol(attack()).failure
    assert failure is not None
    assert failure.name == detector, failure
    assert failure.detail or failure.value is not None


def split_k() -> Program:
    steps = (
        TRANSPOSE,
        op("aten.slice.Tensor", V(0), 1, 0, 24, out=4),
        op("aten.slice.Tensor", V(0), 1, 24, 48, out=5),
        op("aten.slice.Tensor", V(3), 0, 0, 24, out=6),
        op("aten.slice.Tensor", V(3), 0, 24, 48, out=7),
        op("aten.addmm.default", V(2), V(4), V(6), out=8),
        op("aten.addmm.default", V(8), V(5), V(7), out=9),
        op("aten.clamp_min.default", V(9), 0, out=10),
    )
    return with_steps(REGION, *steps, output=10)


def bias_last() -> Program:
    steps = (
        TRANSPOSE,
        op("aten.mm.default", V(0), V(3), out=4),
        op("aten.add.Tensor", V(4), V(2), out=5),
    )
    return with_steps(REGION, *steps, op("aten.relu.default", V(5), out=6), output=6)


@pytest.mark.parametrize("honest", [lambda: REFERENCE, split_k, bias_last])
def test_an_honest_twin_passes_every_detector(
    run_protocol: ProtocolRun, honest: Callable[[], Program]
) -> None:
    verdict = run_protocol(honest())
    assert verdict.passed, verdict.failure
    names = {check.name for check in verdict.checks}
    assert names >= {
        "contract",
        "numerics",
        "fresh_output",
        "call_history",
        "repeat",
        "special",
        "impostor",
        "perturb",
    }
    assert verdict.worst_error_ratio is not None


COPY = Region(Program((spec(8, 8),), (op("aten.clone.default", V(0), out=1),), (1,)), ("input",))

VIEW = Region(
    Program((spec(8, 8),), (op("aten.view.default", V(0), (64,), out=1),), (1,)), ("input",)
)


def test_an_alias_of_an_input_where_eager_copies_is_refused(run_protocol: ProtocolRun) -> None:
    failure = run_protocol(Program(COPY.program.inputs, (), (0,)), COPY).failure
    assert failure is not None
    assert failure.name == "contract"
    assert "memory of input 0" in failure.detail


def test_the_view_that_eager_also_returns_passes(run_protocol: ProtocolRun) -> None:
    other_way = Program(
        VIEW.program.inputs, (op("aten.reshape.default", V(0), (64,), out=1),), (1,)
    )
    verdict = run_protocol(other_way, VIEW)
    assert verdict.passed, verdict.failure


def test_one_buffer_for_all_calls_is_refused(run_protocol: ProtocolRun) -> None:
    constant = torch.ones(4)
    region = Region(
        Program((spec(4),), (op("aten.full.default", (4,), 1.0, device=CPU, out=1),), (1,)),
        ("input",),
    )
    failure = run_protocol(
        Program((spec(4),), (), (1,), ("kept",), {"kept": constant}), region
    ).failure
    assert failure is not None
    assert failure.name == "contract"
    assert "no rule" in failure.detail


def test_what_is_right_only_for_finite_values_needs_the_users_word(
    run_protocol: ProtocolRun,
) -> None:
    verdict = run_protocol(swallow_nan(), terms=Contract(assume_finite=True))
    assert verdict.passed, verdict.failure
    (check,) = [check for check in verdict.checks if check.name == "special"]
    assert "assume_finite" in check.detail


def test_a_dropped_bias_is_seen_in_bfloat16_too(run_protocol: ProtocolRun) -> None:
    region = linear_relu(torch.bfloat16)
    t, _, relu = region.program.steps
    dropped = replace(region.program, steps=(t, op("aten.mm.default", V(0), V(3), out=4), relu))
    failure = run_protocol(dropped, region).failure
    assert failure is not None
    assert failure.name == "numerics"
    assert run_protocol(region.program, region).passed


def test_the_lax_contract_lets_through_what_the_strict_one_stops(run_protocol: ProtocolRun) -> None:
    assert run_protocol(wrong_scale(), terms=Contract("kernelbench"), checks=[NUMERICS]).passed
    assert not run_protocol(wrong_scale(), terms=Contract("strict"), checks=[NUMERICS]).passed


def test_the_negative_controls_notice_a_comparison_that_accepts_anything(
    run_protocol: ProtocolRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_cudal1.judge.checks import negative_controls as module
    from torch_cudal1.judge.reference.compare import Comparison

    monkeypatch.setattr(module, "compare", lambda *a, **k: Comparison(True, 1.0, 2.0))
    failure = run_protocol(REFERENCE, checks=[NUMERICS, IMPOSTOR]).failure
    assert failure is not None
    assert failure.name == "impostor"
    assert "zeros" in failure.detail


def test_special_values_are_asked_even_where_numbers_agree(run_protocol: ProtocolRun) -> None:
    failure = run_protocol(swallow_nan(), checks=[NUMERICS, SPECIAL]).failure
    assert failure is not None
    assert failure.name == "special"


def test_integer_inputs_are_legal_for_an_embedding(run_protocol: ProtocolRun) -> None:
    program = Program(
        (spec(50, 8), spec(4, 6, dtype=torch.int64)),
        (op("aten.embedding.default", V(0), V(1), out=2),),
        (2,),
    )
    region = Region(program, ("parameter", "input"))
    assert run_protocol(program, region).passed
    clamped = (
        op("aten.clamp_max.default", V(1), 1, out=2),
        op("aten.embedding.default", V(0), V(2), out=3),
    )
    failure = run_protocol(replace(program, steps=clamped, outputs=(3,)), region).failure
    assert failure is not None
    assert failure.name == "numerics"


def test_detectors_can_be_chosen_and_order_is_kept(run_protocol: ProtocolRun) -> None:
    with pytest.raises(ValueError, match="not enough values"):
        run_protocol(
            REFERENCE, checks=[CALL_HISTORY]
        )  # it reads the input sets that numerics draws
    checks = run_protocol(REFERENCE, checks=[NUMERICS, CALL_HISTORY]).checks
    assert list(dict.fromkeys(check.name for check in checks)) == [
        "contract",
        "numerics",
        "call_history",
    ]


def test_inputs_of_another_form_are_refused() -> None:
    other = replace(
        REFERENCE, inputs=(TensorSpec("float32", (1, 48), (48, 1), "cpu"), *REFERENCE.inputs[1:])
    )
    assert [(check.name, check.passed) for check in contract(REGION, candidate(other))] == [
        ("contract", False)
    ]


def test_a_program_that_writes_to_its_inputs_is_refused() -> None:
    assert [(check.name, check.passed) for check in contract(REGION, candidate(in_place()))] == [
        ("contract", False)
    ]


def test_an_honest_program_passes_every_check_of_memory(child: Child) -> None:
    trial = Trial(subject(REGION), candidate(REGION.program), Contract(), CPU, child)
    trial.load("candidate", candidate(REGION.program))
    verdict = validate(
        trial,
        checks=(
            NUMERICS,
            FRESH_OUTPUT,
            POISON,
            GUARD_BAND,
            GUARD_PAGE,
            GHOST,
            RESOURCE,
            ISOLATION,
        ),
    )
    assert verdict.passed, verdict.failure
    assert {check.name for check in verdict.checks} >= {
        "poison",
        "guard_band",
        "guard_page",
        "ghost",
        "resource",
        "isolation",
    }


def test_an_honest_module_passes_every_fast_check_of_state(module_bench: ModuleBench) -> None:
    checks = (
        STATE_DICT,
        PERTURB,
        SCALARS,
        UPDATE_PATH,
        SHAPES,
        LAYOUTS,
        CALL_HISTORY,
        REPEAT,
        GRAD,
    )
    module_bench.assert_verdict(({}, "fast", checks, None))
