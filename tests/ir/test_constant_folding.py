"""What depends on no input is computed once: the same results, never memory that the caller gets,
and nothing that may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime.executors import assert_same, draw_inputs
from tests.runtime.test_cuda_graph import CPU, gpu, needs_extension
from tests.runtime.test_split_last_kernel import program_of
from torch_cudal1.ir import constant_folding
from torch_cudal1.ir.constant_folding import fold_constants
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Alloc, Aten, Call, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.runtime.executor import prepare

X = (4, 4)


def mask_above_diagonal(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape[-1], x.shape[-1], device=x.device).tril()
    return (x * mask).masked_fill(mask == 0, -math.inf) + torch.arange(x.shape[-1], device=x.device)


PROGRAMS: dict[str, tuple[Callable[..., Any], int]] = {  # and how many steps are computed once
    "a mask and positions": (mask_above_diagonal, 4),
    "a table": (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]).exp(), 2),
    "a view of a constant": (lambda x: x + torch.arange(16).view(4, 4).t(), 3),
    "also a result": (lambda x: (x + (a := torch.ones(4)), a), 0),
    "a result's operand": (lambda x: ((a := torch.arange(4.0)) + x, a.exp()), 1),
    "a view as a result": (lambda x: (x + (a := torch.arange(16.0)).view(4, 4), a.view(2, 8)), 0),
    "pieces of one as results": (
        lambda x: (x + (a := torch.arange(16.0)).view(4, 4), *torch.unsafe_split(a, 8)),
        0,
    ),
    "numbers drawn": (lambda x: x + torch.rand(4), 0),
    "a shape's own": (lambda x: x + torch.zeros_like(x), 0),
    "nothing": (lambda x: x.relu(), 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_the_same_with_less_to_do(name: str) -> None:
    function, fewer = PROGRAMS[name]
    program = program_of(function, torch.randn(X))
    folded = fold_constants(program, CPU, interpret)
    assert len(program.steps) - len(folded.steps) == fewer
    assert (folded is program) == (fewer == 0)
    if "drawn" in name:
        return
    run = prepare(program, CPU)
    for _ in range(3):
        inputs = draw_inputs(program, CPU, 2)
        expected = interpret(program, CPU)(inputs)
        for results in (run(inputs), interpret(folded, CPU)(inputs)):
            assert_same(results, expected, inputs)
            for out in results:
                if out is not None:
                    out.fill_(7)  # a caller may do with its results what it likes


@needs_extension
def test_the_executor_in_cpp_has_fewer_steps() -> None:
    program = program_of(mask_above_diagonal, torch.randn(X))
    assert prepare(program, CPU).steps == len(program.steps) - 4  # type: ignore[attr-defined]


def test_what_is_too_large_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(lambda x: x + torch.arange(4096.0)[:4], torch.randn(X))
    assert fold_constants(program, CPU, interpret) is not program
    monkeypatch.setattr(
        constant_folding, "MAX_FOLDED_BYTES", 4096 * 4 - 1
    )  # of the memory, not of the view
    assert fold_constants(program, CPU, interpret) is program


def test_what_fails_fails_when_it_is_called() -> None:
    spec = TensorSpec("float32", X, (4, 1), "cpu")
    wrong = Aten("aten.ones.default", ((2, -3),), (), (1,))
    program = Program(
        (spec,), (wrong, Aten("aten.add.Tensor", (Value(0), Value(1)), (), (2,))), (2,)
    )
    run = prepare(program, CPU)
    with pytest.raises(RuntimeError):
        run([torch.randn(X)])


def test_what_lies_on_another_device_stays_a_step() -> None:
    spec = TensorSpec("float32", X, (4, 1), "cpu")
    meta = Aten("aten.ones.default", ((4,),), (("device", torch.device("cpu")),), (1,))
    program = Program(
        (spec,), (meta, Aten("aten.add.Tensor", (Value(0), Value(1)), (), (2,))), (2,)
    )
    assert (
        fold_constants(program, torch.device("meta"), lambda each, _: interpret(each, CPU))
        is program
    )


def test_a_nested_program_that_hands_its_operand_on_gets_no_constant() -> None:
    spec = TensorSpec("float32", (4,), (1,), "cpu")
    inner = Program((spec,), (), (0,))
    for passes, fewer in (
        (inner, 0),
        (Program((spec,), (Aten("aten.relu.default", (Value(0),), (), (1,)),), (1,)), 1),
    ):
        make_ones = Aten("aten.ones.default", ((4,),), (), (1,))
        program = Program((spec,), (make_ones, Call(passes, (1,), (2,))), (2, 0))
        assert len(program.steps) - len(fold_constants(program, CPU, interpret).steps) == fewer


def test_a_kernel_s_own_program_stays_as_it_is() -> None:
    spec = TensorSpec("float32", (4,), (1,), "cuda")
    steps = (Alloc(1, spec), Launch("k", "k", (1, 1, 1), 32, 0, (LaunchArg("ptr", Value(1)),)))
    program = Program((spec,), steps, (1,), payloads={"k": torch.zeros(4, dtype=torch.uint8)})
    assert fold_constants(program, CPU, interpret) is program


def test_the_default_dtype_is_that_of_the_moment_and_part_of_a_region_s_key() -> None:
    program = program_of(lambda x: x + torch.ones(4), torch.randn(X))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        (wide,) = prepare(program, CPU)([torch.randn(X)])
    finally:
        torch.set_default_dtype(before)
    (narrow,) = prepare(program, CPU)([torch.randn(X)])
    assert wide is not None
    assert narrow is not None
    assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)


@pytest.mark.gpu
@gpu
def test_on_a_gpu_it_is_ready_for_every_stream() -> None:
    device = torch.device("cuda", 0)
    program = program_of(mask_above_diagonal, torch.randn(64, 64, device=device))
    run = prepare(program, device)
    assert run.steps == len(program.steps) - 4  # type: ignore[attr-defined]
    with torch.inference_mode():
        for _ in range(8):
            with torch.cuda.stream(torch.cuda.Stream()):
                x = torch.randn(64, 64, device=device)
                assert torch.equal(run([x])[0], mask_above_diagonal(x))
