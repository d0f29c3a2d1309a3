"""The interpreter calls what a Program names, step by step, and keeps no value longer than needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.runtime.executors import MIXED_STEPS, SPEC, TANH, compute_mixed_steps
from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.interpreter import interpret, interpret_steps, refuse_launch, skip_launch
from torch_cudal1.ir.program import Alloc, Aten, Call, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.ir.value_specs import output_specs, value_specs

CPU = torch.device("cpu")
KERNEL = Launch(
    "k", "kernel", (1, 1, 1), 32, 0, (LaunchArg("ptr", Value(0)), LaunchArg("ptr", Value(1)))
)
WITH_KERNEL = Program(
    (SPEC,),
    (Alloc(1, TensorSpec("float16", (8, 4), (4, 1), "cpu")), KERNEL),
    (1,),
    payloads={"k": torch.arange(4, dtype=torch.uint8)},
)


def test_a_program_of_every_kind_of_step_gives_what_eager_gives() -> None:
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    joined, top, absent = interpret(MIXED_STEPS, CPU)([x, y])
    torch.testing.assert_close((joined, top), compute_mixed_steps(x, y), rtol=1e-6, atol=1e-6)
    assert absent is None


def test_an_output_may_be_an_input_and_a_constant_serves_every_call() -> None:
    constant = torch.full((1, 6), 2.0)
    program = Program((SPEC,), (), (0, 1), constants=("c",), payloads={"c": constant})
    run, x = interpret(program, CPU), torch.ones(6, 6)
    for _ in range(2):
        first, second = run([x])
        assert first is x
        assert torch.equal(second, constant)


def test_a_device_in_a_program_is_the_device_of_the_caller() -> None:
    steps = (Aten("aten.zeros.default", ((2, 3),), (("device", torch.device("cuda")),), (1,)),)
    (result,) = interpret_steps(
        Program((SPEC,), steps, (1,)), steps, torch.device("meta"), refuse_launch
    )([torch.ones(6, 6, device="meta")])
    assert result.device == torch.device("meta")


def test_lists_of_values_reach_an_operator_as_lists() -> None:
    steps = (
        Aten("aten.cat.default", ((Value(0), Value(0)), -1), (), (1,)),
        Aten("aten.permute.default", (Value(1), (1, 0)), (), (2,)),
    )
    x = torch.randn(6, 6)
    (result,) = interpret(Program((SPEC,), steps, (2,)), CPU)([x])
    assert torch.equal(result, torch.cat([x, x], -1).permute(1, 0))


def test_a_step_that_yields_another_number_of_results_is_an_error() -> None:
    split = Aten("aten.split.Tensor", (Value(0), 3), (), (1, 2, 3), many=True)
    with pytest.raises(ValueError, match="zip"):
        interpret(Program((SPEC,), (split,), (3,)), CPU)([torch.ones(6, 6)])


def test_a_broken_program_is_refused_before_any_step() -> None:
    with pytest.raises(ProgramError):
        interpret(replace(TANH, outputs=(7,)), CPU)


def test_without_a_launcher_a_kernel_is_refused_by_its_name() -> None:
    with pytest.raises(ProgramError, match="kernel 'kernel' in a Program"):
        interpret(WITH_KERNEL, CPU)


def test_a_launcher_gets_machine_code_launch_and_device_and_runs_in_its_place() -> None:
    calls: list[tuple[Any, ...]] = []

    def launcher(
        cubin: torch.Tensor, launch: Launch, device: torch.device
    ) -> Callable[[Sequence[Any]], None]:
        calls.append((cubin.tolist(), launch, device))

        def write(values: Sequence[Any]) -> None:
            values[1].copy_(values[0][0, 0])

        return write

    nested = Program((SPEC,), (Call(WITH_KERNEL, (0,), (1,)),), (1,))
    run = interpret(nested, CPU, launcher=launcher)
    assert calls == [([0, 1, 2, 3], KERNEL, CPU)]
    for value in (3.0, 4.0):
        (result,) = run([torch.full((6, 6), value)])
        assert torch.equal(result, torch.full((8, 4), value, dtype=torch.float16))
    assert len(calls) == 1


def test_shapes_come_without_launching() -> None:
    program = replace(WITH_KERNEL, payloads={"k": torch.zeros(4, dtype=torch.uint8)})
    assert output_specs(program) == [TensorSpec("float16", (8, 4), (4, 1), "cpu")]
    assert interpret(program, CPU, launcher=skip_launch)([torch.ones(6, 6)])[0].shape == (8, 4)
    assert value_specs(MIXED_STEPS)[5] == TensorSpec("float32", (3, 6), (6, 1), "cpu")
