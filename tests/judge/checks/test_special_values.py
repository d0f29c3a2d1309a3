"""NaN and infinities that rounding decides about: excused where eager's own change with it, and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.judge.checks.module_sources import ModuleBench, ModuleCase
from tests.judge.checks.program_bench import SCALE, ProgramChecker, get_last
from tests.judge.programs import V, op, spec
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Contract, Region
from torch_cudal1.judge.checks.negative_controls import IMPOSTOR
from torch_cudal1.judge.checks.special_values import SPECIAL, _is_decided_by_rounding
from torch_cudal1.judge.checks.tf32 import RIGHTS
from torch_cudal1.judge.reference.compare import mask_mismatches
from torch_cudal1.judge.reference.region_reference import ReferenceFailure

INF = float("inf")
ROWS, TERMS = 200_000, 8


def sum_and_rectify(x: torch.Tensor, w: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A sum in some order, a ReLU, an infinite weight: NaN of a zero, infinity of what is just
    above it.
    """
    total = torch.zeros(len(x))
    for term in order:
        total = total + x[:, term] * w[term]
    return total.relu() * INF


def draw_inputs(cancelling: int) -> list[torch.Tensor]:
    """Sums that cancel exactly but for rounding in the first rows."""
    x = torch.randn(ROWS, TERMS, generator=torch.Generator().manual_seed(5))
    x[:cancelling, 4:] = -x[:cancelling, :4]
    return [x, torch.full((TERMS,), 0.3)]


def is_excused(
    eager: Callable[..., torch.Tensor], inputs: list[torch.Tensor], result: torch.Tensor
) -> bool:
    def run(moved_inputs: Sequence[torch.Tensor]) -> Any:
        return SimpleNamespace(outputs=[eager(*moved_inputs)])

    sample = SimpleNamespace(inputs=inputs, expected=run(inputs), eager=run)
    trial = SimpleNamespace(device=torch.device("cpu"), contract=Contract())
    wrong = mask_mismatches(result, [sample.expected.outputs[0]])
    assert bool(wrong.any())
    return _is_decided_by_rounding(trial, sample, 0, wrong)  # type: ignore[arg-type]


def eager(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return sum_and_rectify(x, w, range(TERMS))


def test_another_order_of_a_sum_is_excused() -> None:
    inputs = draw_inputs(cancelling=15)
    assert is_excused(eager, inputs, sum_and_rectify(*inputs, [0, 4, 1, 5, 2, 6, 3, 7]))


def test_more_places_than_a_few_are_not() -> None:
    inputs = draw_inputs(cancelling=2_000)
    assert not is_excused(eager, inputs, sum_and_rectify(*inputs, [0, 4, 1, 5, 2, 6, 3, 7]))


@pytest.mark.parametrize("value", [0.0, INF, -INF, float("nan")])
def test_a_place_that_rounding_does_not_touch_is_not(value: float) -> None:
    inputs = draw_inputs(cancelling=15)
    result = eager(*inputs)
    settled = int((inputs[0] @ inputs[1]).abs().argmax())
    if result[settled].isnan() == torch.tensor(value).isnan() or result[settled] == value:
        settled = int(
            (inputs[0] @ inputs[1]).argmax() if value != INF else (inputs[0] @ inputs[1]).argmin()
        )
    result[settled] = value
    assert not is_excused(eager, inputs, result)


def test_a_nan_that_is_swallowed_is_not() -> None:
    inputs = draw_inputs(cancelling=0)
    inputs[0][7, 3] = float("nan")
    result = torch.nan_to_num(eager(*inputs), nan=0.0, posinf=INF)
    result[torch.arange(ROWS) != 7] = eager(*inputs)[torch.arange(ROWS) != 7]
    assert not is_excused(eager, inputs, result)


def test_a_reference_that_changes_everywhere_excuses_nothing() -> None:
    def strict(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.where(x[:, 0] * w[0] == x[:, 0] * 0.3, eager(x, w), 1.0)

    inputs = draw_inputs(cancelling=15)
    result = strict(*inputs)
    result[100] = 1.0 if not result[100].isfinite() else INF
    assert not is_excused(strict, inputs, result)


def test_a_reference_that_refuses_moved_inputs_excuses_nothing() -> None:
    inputs, calls = draw_inputs(cancelling=15), []

    def once(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise ReferenceFailure("running eager", "not these")
        return eager(x, w)

    assert not is_excused(once, inputs, sum_and_rectify(*inputs, [0, 4, 1, 5, 2, 6, 3, 7]))


MODULES: dict[str, ModuleCase] = {
    "NaN becomes zero": (
        {"result": "torch.nan_to_num(self.plain(x, y), 0.0)"},
        "fast",
        (SPECIAL,),
        "special",
    ),
    "infinity is clipped": (
        {"result": "self.plain(x, y).clamp_min(-3e38)"},
        "standard",
        (SPECIAL,),
        "special",
    ),
    "denormals are flushed": (
        {"before": "x, y = (torch.where(t.abs() < 1e-38, 0 * t, t) for t in (x, y))"},
        "standard",
        (SPECIAL,),
        None,  # the bias and the running mean carry the result
    ),
    "special values as in eager": ({}, "standard", (SPECIAL, RIGHTS, IMPOSTOR), None),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_source_that_changes_special_values_is_refused_and_an_honest_source_passes(
    module_bench: ModuleBench, name: str
) -> None:
    module_bench.assert_verdict(MODULES[name])


COPY = Region(Program((spec(16, 64),), (op("aten.clone.default", V(0), out=1),), (1,)), ("input",))


def flush_denormals() -> Program:
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


def drop_signs_of_zeros() -> Program:
    return replace(COPY.program, steps=(op("aten.add.Scalar", V(0), 0.0, out=1),), outputs=(1,))


@pytest.mark.parametrize(
    ("region", "attack", "detector", "word"),
    [
        (SCALE, flush_denormals, "special", "denormals"),
        (SCALE, through_float16, "numerics", "normal"),
        (COPY, drop_signs_of_zeros, "special", "other sign"),
    ],
)
def test_values_that_fast_arithmetic_gets_wrong_are_tried(
    check_program: ProgramChecker,
    region: Region,
    attack: Callable[[], Program],
    detector: str,
    word: str,
) -> None:
    check = get_last(check_program(region, attack(), "standard", SPECIAL))
    assert (check.passed, check.name) == (False, detector)
    assert word in check.detail
    assert get_last(check_program(region, region.program, "standard", SPECIAL)).passed
