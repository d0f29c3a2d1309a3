"""NaN, infinities and values that fast arithmetic gets wrong: they go where eager sends them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.judge.checks.module_sources import ModuleBench, ModuleCase
from tests.judge.checks.program_bench import SCALE, ProgramChecker, get_last
from tests.judge.programs import V, op, spec
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Region
from torch_cudal1.judge.checks.negative_controls import IMPOSTOR
from torch_cudal1.judge.checks.special_values import SPECIAL
from torch_cudal1.judge.checks.tf32 import RIGHTS

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
