"""Recurrent layers' CUDA C++, run on the CPU thread by thread against float64; what it does not
serve is refused with reasons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.cuda_on_cpu import compiler, run_on_cpu
from tests.kernels.traced_programs import emit_program
from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.device.cuda.nvrtc import nvrtc_status
from torch_cudal1.graph.fusion.partition import partition
from torch_cudal1.ir.program import Aten, Launch, Program, TensorSpec, Value
from torch_cudal1.ir.records import Region
from torch_cudal1.kernels import propose
from torch_cudal1.kernels.codegen.compile import build
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.runtime.executor import prepare

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


@dataclass(frozen=True)
class RecurrentCase:
    """A layer, and a batch of sequences for it."""

    kind: str
    width: int
    hidden: int = 64
    layers: int = 1
    sequences: int = 2
    steps: int = 3
    bidirectional: bool = False
    batch_first: bool = False
    bias: bool = True

    def module(self) -> Any:
        torch.manual_seed(3)
        more = {"nonlinearity": self.kind.partition("_")[2]} if self.kind.startswith("rnn") else {}
        return KINDS[self.kind](
            self.width,
            self.hidden,
            self.layers,
            bias=self.bias,
            batch_first=self.batch_first,
            bidirectional=self.bidirectional,
            **more,
        ).requires_grad_(False)

    def inputs(self) -> list[Tensor]:
        """What it reads, its states, its weights."""
        generator = torch.Generator().manual_seed(5)
        shape = (self.sequences, self.steps) if self.batch_first else (self.steps, self.sequences)
        state = (self.layers * (1 + self.bidirectional), self.sequences, self.hidden)
        states = [torch.randn(state, generator=generator) for _ in range(1 + (self.kind == "lstm"))]
        return [
            torch.randn(*shape, self.width, generator=generator),
            *states,
            *self.module()._flat_weights,
        ]

    def arguments(self, values: Any) -> tuple[Any, ...]:
        """Those of the operator, with `values` in the places of the tensors."""
        count = 1 + (self.kind == "lstm")
        states = tuple(values[1 : 1 + count]) if count > 1 else values[1]
        weights = tuple(values[1 + count :])
        return (
            values[0],
            states,
            weights,
            self.bias,
            self.layers,
            0.0,
            False,
            self.bidirectional,
            self.batch_first,
        )

    def program(self) -> Program:
        inputs = self.inputs()
        specs = tuple(replace(TensorSpec.of(tensor), device="cuda") for tensor in inputs)
        first, count = len(specs), 2 + (self.kind == "lstm")
        outs = tuple(range(first, first + count))
        values = [Value(number) for number in range(first)]
        return Program(
            specs, (Aten(f"aten.{self.kind}.input", self.arguments(values), (), outs, True),), outs
        )


CASES = {
    "one LSTM layer": RecurrentCase("lstm", 20, steps=5),
    "a stack of LSTM layers, batch first": RecurrentCase(
        "lstm", 36, layers=2, sequences=3, batch_first=True
    ),
    "both ways, without biases": RecurrentCase("lstm", 9, layers=2, bidirectional=True, bias=False),
    "a stack of GRU layers": RecurrentCase("gru", 64, layers=2, sequences=1),
    "GRU both ways, three layers, batch first": RecurrentCase(
        "gru", 33, layers=3, bidirectional=True, batch_first=True
    ),
    "tanh with rows too long for two in a thread": RecurrentCase("rnn_tanh", 300, sequences=5),
    "relu of one step": RecurrentCase("rnn_relu", 8, layers=2, steps=1),
}


def exact(case: RecurrentCase) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Eager's results in float32 and in float64."""
    operator = getattr(torch, case.kind)
    inputs = case.inputs()
    return operator(*case.arguments(inputs)), operator(
        *case.arguments([tensor.double() for tensor in inputs])
    )


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", CASES)
def test_every_element_is_as_exact_as_eagers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (proposal,) = propose(case.program(), 90)
    outputs = run_on_cpu(case.program(), proposal, case.inputs(), tmp_path)
    eager, exact_outputs = exact(case)
    assert len(outputs) == len(exact_outputs)
    for output, eager_output, right in zip(outputs, eager, exact_outputs, strict=True):
        assert (output.shape, output.stride()) == (eager_output.shape, eager_output.stride())
        error, allowed = (output - right).abs().max(), (eager_output - right).abs().max()
        assert float(error) <= 4 * float(allowed) + 1e-6, (float(error), float(allowed))


def test_not_a_number_stays_in_its_sequence(tmp_path: Path) -> None:
    if compiler() is None:
        pytest.skip("needs a C++ compiler")
    case = CASES["relu of one step"]
    inputs = case.inputs()
    inputs[0][0, 1, 3] = math.nan
    (proposal,) = propose(case.program(), 90)
    out, _ = run_on_cpu(case.program(), proposal, inputs, tmp_path)
    assert out[:, 0].isfinite().all()
    assert out[:, 1].isnan().all()


def test_a_stack_is_one_launch_and_both_ways_one_for_each_layer() -> None:
    for name, count in (
        ("a stack of LSTM layers, batch first", 1),
        ("GRU both ways, three layers, batch first", 3),
    ):
        (proposal,) = propose(CASES[name].program(), 90)
        built, _ = emit_program(CASES[name].program(), proposal)
        launches = [step for step in built.steps if isinstance(step, Launch)]
        assert len(launches) == 1 + count  # and one that clears the flags
        assert {launch.cluster for launch in launches[1:]} == {8}


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (RecurrentCase("lstm", 20, hidden=80), "hidden size"),
        (RecurrentCase("lstm", 20, hidden=320), "hidden size"),
        (RecurrentCase("gru", 20, sequences=17), "at most 16 sequences"),
        (RecurrentCase("gru", 600), "rows of at most 512"),
        (RecurrentCase("lstm", 20, layers=9), "clusters"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(case: RecurrentCase, why: str) -> None:
    assert propose(case.program(), 90) == () or why == "clusters"
    with pytest.raises(NotLowerableError, match=why):
        emit_program(case.program(), Proposal("recurrent", {"method": "resident"}))


def test_there_is_nothing_without_clusters_or_for_nonsense() -> None:
    program = CASES["one LSTM layer"].program()
    assert propose(program, 89) == ()
    with pytest.raises(ProgramError, match="method"):
        emit_program(program, Proposal("recurrent", {"method": "resident", "rows": 4}))


def test_the_layer_is_a_fusion_group_of_its_own_where_products_are() -> None:
    program = CASES["a stack of GRU layers"].program()
    (step,) = program.steps
    assert isinstance(step, Aten)
    first = len(program.inputs)
    before = Aten("aten.neg.default", (Value(0),), (), (first,), False)
    moved = replace(
        step, args=(Value(first), *step.args[1:]), outs=tuple(out + 1 for out in step.outs)
    )
    after = Aten("aten.relu.default", (Value(moved.outs[0]),), (), (moved.outs[-1] + 1,), False)
    surrounded = Program(program.inputs, (before, moved, after), after.outs)
    region = Region(surrounded, tuple("input" for _ in surrounded.inputs))
    assert [group.steps for group in partition(region, products=True).groups] == [(1,)]
    assert partition(region).groups == ()


@pytest.mark.skipif(not nvrtc_status()[0], reason="needs NVRTC")
@pytest.mark.parametrize("name", CASES)
def test_it_compiles_to_machine_code_without_spilling_into_memory(name: str) -> None:
    (proposal,) = propose(CASES[name].program(), 90)
    built = build(CASES[name].program(), proposal, 90)
    assert any(isinstance(step, Launch) and step.cluster == 8 for step in built.steps)


LARGE = {
    "LSTM": RecurrentCase("lstm", 128, 256, layers=6, sequences=10, steps=40, batch_first=True),
    "LSTM both ways": RecurrentCase(
        "lstm", 128, 256, layers=3, sequences=10, steps=40, bidirectional=True, batch_first=True
    ),
    "GRU": RecurrentCase("gru", 128, 256, layers=6, sequences=10, steps=40),
    "GRU both ways": RecurrentCase(
        "gru", 128, 256, layers=3, sequences=10, steps=40, bidirectional=True
    ),
    "tanh": RecurrentCase("rnn_tanh", 500, 192, layers=4, sequences=16, steps=40),
    "relu": RecurrentCase("rnn_relu", 7, 64, layers=8, sequences=1, steps=200),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("name", {**CASES, **LARGE})
def test_on_a_gpu_too_and_again_and_again(name: str) -> None:
    """Flags are cleared by each call, and two calls on streams of their own wait for nobody for
    ever.
    """
    case = {**CASES, **LARGE}[name]
    sm = 10 * torch.cuda.get_device_capability()[0]
    proposals = propose(case.program(), sm)
    if not proposals:
        pytest.skip("this GPU has no clusters")
    run = prepare(build(case.program(), proposals[0], sm), torch.device("cuda"))
    inputs = [tensor.cuda() for tensor in case.inputs()]
    eager, exact_outputs = exact(case)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(12):
        with torch.cuda.stream(streams[turn % 3]):
            outputs = run(inputs)
        torch.cuda.synchronize() if turn < 3 else None
    torch.cuda.synchronize()
    for output, eager_output, right in zip(outputs, eager, exact_outputs, strict=True):
        assert output is not None
        error, allowed = (output.cpu() - right).abs().max(), (eager_output - right).abs().max()
        assert float(error) <= 4 * float(allowed) + 1e-6, (float(error), float(allowed))
