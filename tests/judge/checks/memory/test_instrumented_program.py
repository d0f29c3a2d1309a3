"""Launches of a Program are counted through nested Programs."""

from __future__ import annotations

from dataclasses import replace

from tests.judge.programs import linear_relu
from torch_cudal1.ir.program import Call, Launch
from torch_cudal1.judge.checks.memory.instrumented_program import count_launches


def test_launches_of_nested_programs_count() -> None:
    launch = object.__new__(Launch)
    inner = replace(linear_relu().program)
    object.__setattr__(inner, "steps", (launch, launch))
    call = object.__new__(Call)
    object.__setattr__(call, "program", inner)
    outer = replace(linear_relu().program)
    object.__setattr__(outer, "steps", (launch, call))
    assert count_launches(linear_relu().program) == 0
    assert count_launches(outer) == 3
