"""How often one judgement calls a slow reference, and that what is spared lets nothing through.

A region counts as heavy by its FLOPs: one call of diag(a) @ b with n = 4096 is 137 GFLOP, a second
or two on two cores, and its float64 run takes twice that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from tests.judge.programs import V, candidate, linear_relu, op, spec
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Program, Step
from torch_cudal1.ir.records import CheckResult, Contract, Region
from torch_cudal1.judge.checks.history import CALL_HISTORY
from torch_cudal1.judge.checks.memory.uninitialised_memory import POISON
from torch_cudal1.judge.checks.module_semantics.parameters import PERTURB
from torch_cudal1.judge.checks.module_semantics.updates import UPDATE_PATH
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.special_values import SPECIAL
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.profiles import PROFILES
from torch_cudal1.judge.reference.analysis import Facts
from torch_cudal1.judge.reference.compare import EAGER_AGAINST_ITSELF
from torch_cudal1.judge.reference.input_set import ReferenceCache
from torch_cudal1.judge.reference.output_comparison import compare_outputs
from torch_cudal1.judge.reference.region_reference import Outputs, RegionReference, Result
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

CPU = torch.device("cpu")
HEAVY_FLOPS = 2 * 4096**3
DIAGONAL = Region(
    Program(
        (spec(64), spec(64, 64)),
        (op("aten.diag.default", V(0), out=2), op("aten.mm.default", V(2), V(1), out=3)),
        (3,),
    ),
    ("input", "input"),
    name="diagonal times matrix",
)
LINEAR = linear_relu()
TRANSPOSE, ADDMM, RELU = LINEAR.program.steps


@dataclass(frozen=True)
class CountingReference(RegionReference):
    """A heavy region that counts what it is asked; `now` is the check that runs."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter, compare=False)
    now: list[str] = field(default_factory=lambda: [""], compare=False)

    @property
    def facts(self) -> Facts:  # type: ignore[override]
        return replace(
            RegionReference(self.region, self.contract, self.device).facts, flops=HEAVY_FLOPS
        )

    def eager(self, inputs: Sequence[torch.Tensor]) -> Result:
        self.calls[self.now[0], "eager"] += 1
        return super().eager(inputs)

    def exact(self, inputs: Sequence[torch.Tensor]) -> Outputs | Refusal:
        self.calls[self.now[0], "float64"] += 1
        return super().exact(inputs)

    def around(self, check: CheckSpec) -> CheckSpec:
        def run(trial: Trial) -> list[CheckResult]:
            self.now[0] = check.label
            return check.run(trial)

        return replace(check, run=run)

    def total(self, kind: str) -> int:
        return sum(count for (_, name), count in self.calls.items() if name == kind)


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(make_limits(Settings(), CPU), Contract()) as running:
        yield running


def run_checks(
    child: Child,
    region: Region,
    program: Program,
    *checks: CheckSpec,
    reference_cache: ReferenceCache | None = None,
) -> tuple[CountingReference, list[CheckResult]]:
    """The subject with its counts, and the checks."""
    reference = CountingReference(region, Contract(), CPU)
    trial = Trial(
        reference,
        candidate(program),
        Contract(),
        CPU,
        child,
        reference_cache={} if reference_cache is None else reference_cache,
        profile=PROFILES["fast"],
    )
    trial.load("candidate", trial.candidate)
    counted_checks = [reference.around(check) for check in checks]
    results = list(validate(trial, checks=counted_checks or None).checks)
    trial.drop(*list(trial.samples.values()))
    return reference, results


def scale_rows() -> Program:
    """diag(a) @ b as a product of elements, which yields the same bits."""
    return replace(
        DIAGONAL.program,
        steps=(
            op("aten.unsqueeze.default", V(0), 1, out=2),
            op("aten.mul.Tensor", V(2), V(1), out=3),
        ),
    )


FAST_STEPS: tuple[CheckSpec, ...] = (NUMERICS, POISON, PERTURB, UPDATE_PATH, CALL_HISTORY)


def test_of_eagers_own_bits_one_float64_run_is_enough_for_all_checks(child: Child) -> None:
    reference, checks = run_checks(child, DIAGONAL, scale_rows(), *FAST_STEPS)
    assert all(check.passed for check in checks), checks
    assert (
        reference.total("float64") == reference.calls["numerics", "float64"] == 1
    )  # whether the inputs leave digits to compare
    assert reference.calls["numerics", "eager"] == 3  # one a set
    assert (
        reference.calls["call_history", "eager"] == 4
    )  # B; unlike inputs; one element moved; what was never seen
    assert reference.calls["perturb", "eager"] == 1
    assert reference.total("eager") == 8
    numbers = [check for check in checks if check.name == "numerics"]
    assert len(numbers) == 3
    assert all(check.value is not None for check in numbers)


def test_the_next_candidate_of_a_region_finds_what_the_first_one_had_computed(child: Child) -> None:
    reference_cache: ReferenceCache = {}
    run_checks(
        child, LINEAR, LINEAR.program, NUMERICS, SPECIAL, PERTURB, reference_cache=reference_cache
    )
    reference, checks = run_checks(
        child, LINEAR, LINEAR.program, NUMERICS, SPECIAL, PERTURB, reference_cache=reference_cache
    )
    assert all(check.passed for check in checks), checks
    assert reference.calls["special", "eager"] == 0
    assert (
        reference.total("eager") <= 2
    )  # the third distribution is a secret of each candidate, and so is what moves


def test_without_room_to_keep_results_everything_is_computed_again_and_nothing_is_held(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_cudal1.device.gpu_memory._CACHED_HOST_BYTES", 0)
    trials: list[Trial] = []
    held_distributions: list[str] = []
    run = Trial.free_memory

    def free_memory(self: Trial) -> None:
        trials.append(self)
        held_distributions.extend(sample.distribution for sample in self.samples.values())
        run(self)

    monkeypatch.setattr(Trial, "free_memory", free_memory)
    reference_cache: ReferenceCache = {}
    _, checks = run_checks(
        child, LINEAR, in_float64(), NUMERICS, SPECIAL, PERTURB, reference_cache=reference_cache
    )
    assert all(check.passed for check in checks), checks
    assert not reference_cache
    assert not trials[-1].accepted_outputs
    assert held_distributions
    assert not {"uniform", "large", "small"} & set(
        held_distributions
    )  # the third set, which no later detector needs
    assert not any(
        {"expected", "exact", "sensitivity"} & set(vars(sample))
        for sample in trials[-1].samples.values()
    )


def _linear(*steps: Step, output: int) -> Program:
    return replace(LINEAR.program, steps=steps, outputs=(output,))


def in_float64() -> Program:
    """More exact than eager: other bits, and right."""
    wide = [
        op("aten._to_copy.default", V(index), dtype=torch.float64, out=3 + index)
        for index in range(3)
    ]
    rest = (
        op("aten.t.default", V(4), out=6),
        op("aten.addmm.default", V(5), V(3), V(6), out=7),
        op("aten.relu.default", V(7), out=8),
        op("aten._to_copy.default", V(8), dtype=torch.float32, out=9),
    )
    return _linear(*wide, *rest, output=9)


def test_other_bits_are_weighed_against_float64(child: Child) -> None:
    reference, checks = run_checks(child, LINEAR, in_float64(), NUMERICS, CALL_HISTORY)
    assert all(check.passed for check in checks), checks
    assert reference.calls["numerics", "float64"] >= 2  # small inputs may leave eager's bits


def move_slightly(step: float) -> Callable[[], Program]:
    def make_program() -> Program:
        return _linear(
            TRANSPOSE, ADDMM, RELU, op("aten.mul.Scalar", V(5), 1 + step, out=6), output=6
        )

    return make_program


def drop_nan() -> Program:
    return _linear(TRANSPOSE, ADDMM, RELU, op("aten.nan_to_num.default", V(5), out=6), output=6)


def drop_bias() -> Program:
    return _linear(TRANSPOSE, op("aten.mm.default", V(0), V(3), out=4), RELU, output=5)


@pytest.mark.parametrize(
    ("make_wrong", "check"),
    [
        (move_slightly(1e-6), NUMERICS),
        (move_slightly(1e-5), CALL_HISTORY),
        (move_slightly(1e-5), UPDATE_PATH),
        (move_slightly(1e-5), PERTURB),
        (drop_bias, PERTURB),
        (drop_bias, UPDATE_PATH),
        (drop_nan, SPECIAL),
        (move_slightly(1e-5), POISON),
    ],
)
def test_a_subtly_wrong_result_of_a_heavy_region_is_refused_by_each_check_alone(
    child: Child, make_wrong: Callable[[], Program], check: CheckSpec
) -> None:
    def draw(trial: Trial) -> list[CheckResult]:
        for distribution in ("normal", "shifted"):
            trial.draw(distribution)
        return []

    sets = CheckSpec(name="sets", run=draw, asks="nothing")
    before = (sets,) if check is not NUMERICS else ()
    _, checks = run_checks(child, LINEAR, make_wrong(), *before, check)
    assert [check.passed for check in checks][-1] is False, checks


def test_eagers_own_bits_do_not_stand_for_evidence_where_there_is_none(child: Child) -> None:
    """sin x - sin x in two ways: nothing but rounding is left, so that even equal bits prove
    nothing.
    """
    steps = (
        op("aten.sin.default", V(0), out=1),
        op("aten.add.Scalar", V(1), 1e6, out=2),
        op("aten.sub.Scalar", V(2), 1e6, out=3),
        op("aten.sub.Tensor", V(3), V(1), out=4),
    )
    noise = Region(Program((spec(64, 64),), steps, (4,)), ("input",), name="noise")
    _, checks = run_checks(child, noise, noise.program, NUMERICS)
    assert not checks[-1].passed
    assert "no input set leaves digits" in checks[-1].detail


def test_a_result_one_bit_off_is_not_eagers_own(child: Child) -> None:
    reference = RegionReference(LINEAR, Contract(), CPU)
    trial = Trial(reference, candidate(LINEAR.program), Contract(), CPU, child)
    sample = trial.draw("normal")
    same = [None if t is None else t.clone() for t in sample.expected.outputs]
    assert [comparison for _, comparison in compare_outputs(trial, sample, same)] == [
        EAGER_AGAINST_ITSELF
    ]
    assert "exact" not in sample.__dict__
    assert same[0] is not None
    changed = same[0].clone()
    changed.view(-1).view(torch.int32)[7] ^= 1
    ((_, comparison),) = compare_outputs(trial, sample, [changed])
    assert comparison is not EAGER_AGAINST_ITSELF
    assert "exact" in sample.__dict__
    trial.drop(sample)
