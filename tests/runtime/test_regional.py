"""Block by block through Inductor: the same result, each distinct part compiled once."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.ir.stacks import ROWS, WIDTH, capture_region, capture_stack, make_stack
from torch_cudal1.ir.interpreter import Runner, interpret
from torch_cudal1.ir.program import Program
from torch_cudal1.runtime.regional import compile_by_blocks
from torch_cudal1.runtime.runner import build_runner

CPU = torch.device("cpu")


def make_inputs(program: Program) -> list[torch.Tensor]:
    return [torch.randn(spec.shape).as_strided(spec.shape, spec.strides) for spec in program.inputs]


def test_inductor_by_blocks_computes_what_eager_does() -> None:
    program = capture_stack(4)
    inputs = make_inputs(program)
    (result,) = build_runner(program, "regional", CPU)(inputs)
    (expected,) = build_runner(program, "eager", CPU)(inputs)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layers", [4, 9])
def test_more_layers_are_not_more_to_compile(layers: int) -> None:
    compiled: list[Program] = []

    def compile_segment(program: Program) -> Runner:
        compiled.append(program)
        return interpret(program, CPU)

    program = capture_stack(layers)
    inputs = make_inputs(program)
    (result,) = compile_by_blocks(program, CPU, compile_segment)(inputs)
    assert len(compiled) == 3  # a layer, and both ends
    assert torch.equal(result, interpret(program, CPU)(inputs)[0])


def test_what_no_later_part_reads_is_dropped_at_once() -> None:
    program = capture_stack(5)
    alive: list[int] = []
    results: list[weakref.ref[torch.Tensor]] = []

    def compile_segment(segment: Program) -> Runner:
        run = interpret(segment, CPU)

        def watch(inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
            outputs = run(inputs)
            results.extend(weakref.ref(item) for item in outputs if item is not None)
            del inputs
            gc.collect()
            alive.append(sum(item() is not None for item in results))
            return outputs

        return watch

    compile_by_blocks(program, CPU, compile_segment)(make_inputs(program))
    # Two values cross every cut: those that a part reads, and those that it gives.
    assert max(alive) <= 4


def test_constants_reach_the_part_that_reads_them() -> None:
    table = torch.arange(float(WIDTH))

    class WithConstant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = make_stack(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.stack(x * torch.tensor([float(n) for n in range(WIDTH)]))
            return result

    module = WithConstant().eval()
    program = capture_region(module, torch.randn(ROWS, WIDTH)).program
    assert program.constants
    assert any(torch.equal(payload, table) for payload in program.payloads.values())
    inputs = make_inputs(program)
    run = compile_by_blocks(program, CPU, lambda segment: interpret(segment, CPU))
    assert torch.equal(run(inputs)[0], interpret(program, CPU)(inputs)[0])


def test_a_program_without_blocks_is_compiled_as_a_whole() -> None:
    program = capture_region(torch.nn.Linear(4, 4).eval(), torch.randn(2, 4)).program
    compiled: list[Program] = []
    compile_by_blocks(program, CPU, lambda part: compiled.append(part) or interpret(part, CPU))
    assert compiled == [program]
