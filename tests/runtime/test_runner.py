"""Executors and schedules: the same Program gives the same result step by step, through the
operator and through Inductor.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.runtime.executors import MIXED_STEPS, SPEC, TANH, compute_mixed_steps
from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.schedule import REGIONAL, Schedule
from torch_cudal1.runtime import runner as runner_module
from torch_cudal1.runtime import split_last_kernel
from torch_cudal1.runtime.executor import prepare
from torch_cudal1.runtime.operator import register, run_operator
from torch_cudal1.runtime.runner import build_runner
from torch_cudal1.runtime.split_last_kernel import SplitRunner

CPU = torch.device("cpu")


@pytest.mark.parametrize("schedule", ["eager", "inductor"])
def test_schedules_agree_with_eager(schedule):
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    with torch.no_grad():
        joined, top, absent = build_runner(MIXED_STEPS, schedule, CPU)([x, y])
    torch.testing.assert_close((joined, top), compute_mixed_steps(x, y), rtol=1e-6, atol=1e-6)
    assert absent is None


def make_product(size: int) -> Program:
    """relu(x) @ x"""
    return Program(
        (TensorSpec("float32", (size, size), (size, 1), "cpu"),),
        (
            Aten("aten.relu.default", (Value(0),), (), (1,)),
            Aten("aten.mm.default", (Value(1), Value(0)), (), (2,)),
        ),
        (2,),
    )


PRODUCT = make_product(8)


@pytest.mark.parametrize(
    ("base", "options", "min_bytes", "is_split"),
    [
        ("inductor", {}, 1, True),
        ("regional", {}, 1, True),
        ("inductor", {"max_autotune": False}, 1, True),
        # Inductor's own kernels for a product may be faster,
        ("max-autotune", {}, 1, False),
        ("inductor", {"max_autotune_gemm": True}, 1, False),
        # and a small result costs nothing to copy.
        ("inductor", {}, 1 << 20, False),
    ],
)
def test_on_a_gpu_a_product_that_yields_much_is_no_part_of_what_is_compiled(
    base: str,
    options: dict[str, bool],
    min_bytes: int,
    is_split: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[Program] = []

    def compile_steps(program: Program, *_: object) -> Runner:
        compiled.append(program)
        return prepare(program, CPU)

    monkeypatch.setattr(split_last_kernel, "MIN_SPLIT_BYTES", min_bytes)
    monkeypatch.setattr(runner_module, "_compile", compile_steps)
    monkeypatch.setattr(runner_module, "prepare", lambda program, _: prepare(program, CPU))
    gpu = torch.device("cuda", 0)
    run = runner_module._compile_in_parts(PRODUCT, Schedule.parse(base), gpu, options)
    assert isinstance(run, SplitRunner) == is_split
    assert [len(program.steps) for program in compiled] == [1 if is_split else 2]
    x = torch.randn(8, 8)
    assert torch.equal(run([x])[0], torch.relu(x) @ x)


def test_a_last_product_whose_operands_may_be_padded_is_compiled_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor pads it, which PyTorch's own call does not."""
    compiled: list[tuple[Program, Schedule]] = []

    def compile_steps(program: Program, schedule: Schedule, *_: object) -> Runner:
        compiled.append((program, schedule))
        return prepare(program, CPU)

    monkeypatch.setattr(split_last_kernel, "MIN_SPLIT_BYTES", 1)
    monkeypatch.setattr(runner_module, "_compile", compile_steps)
    gpu = torch.device("cuda", 0)
    run = runner_module._compile_in_parts(make_product(7), REGIONAL, gpu, {})
    assert isinstance(run, SplitRunner)
    assert [(len(program.steps), str(schedule)) for program, schedule in compiled] == [
        (1, "regional"),
        (1, "inductor"),
    ]
    x = torch.randn(7, 7)
    assert torch.equal(run([x])[0], torch.relu(x) @ x)


def test_the_operator_passes_opcheck():
    program = register(TANH)
    torch.library.opcheck(
        run_operator(),
        ([torch.randn(6, 6)], program),
        test_utils=("test_schema", "test_faketensor"),
    )


class TanhByOperator(torch.nn.Module):
    """tanh, as the operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run_operator()([x], register(TANH))[0]
        return result


def test_export_keeps_the_operator_as_one_node():
    exported = torch.export.export(TanhByOperator(), (torch.randn(6, 6),))
    assert [node.target for node in exported.graph.nodes if "cudal1" in str(node.target)] == [
        run_operator()
    ]
    x = torch.randn(6, 6)
    assert torch.equal(exported.module()(x), torch.tanh(x))


def test_inductor_calls_the_operator_as_one_node_between_its_own_kernels():
    x, program, operator = torch.randn(6, 6), register(TANH), run_operator()
    compiled = torch.compile(lambda x: operator([x + 1], program)[0] * 2, fullgraph=True)
    with torch.no_grad():
        result, (code,) = run_and_get_code(compiled, x)
    torch.testing.assert_close(result, torch.tanh(x + 1) * 2, rtol=1e-6, atol=1e-6)
    assert code.count("torch.ops.cudal1.run.default(") == 1
    assert "tanh" not in code


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_cuda_graph_takes_the_operator_s_steps():
    on_gpu = TensorSpec("float32", (6, 6), (6, 1), "cuda")
    program = register(Program((on_gpu,), TANH.steps, (1,)))
    x = torch.randn(6, 6, device="cuda")
    with torch.no_grad():
        run_operator()([x], program)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (out,) = run_operator()([x], program)
        x.normal_()
        graph.replay()
        assert torch.equal(out, torch.tanh(x))


def test_the_operator_refuses_gradients_and_unknown_programs():
    program = register(TANH)
    with pytest.raises(ProgramError, match="autograd"):
        run_operator()([torch.randn(6, 6, requires_grad=True)], program)
    with pytest.raises(ProgramError, match="not registered"), torch.no_grad():
        run_operator()([torch.randn(6, 6)], "0" * 64)


def test_what_is_compiled_for_a_gpu_does_not_depend_on_the_c_compiler_s_name(monkeypatch):
    recorded: list[dict[str, object]] = []
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx",
        lambda module, inputs, config_patches: recorded.append(config_patches),
    )
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: module)
    spec = TensorSpec("float32", (2, 2), (2, 1), "cuda")
    relu = Aten("aten.relu.default", (Value(0),), (), (1,))
    for program, device in (
        (Program((spec,), (relu,), (1,), payloads={}), "cuda"),
        (
            Program(
                (spec, replace(spec, device="cpu")), (replace(relu, outs=(2,)),), (2,), payloads={}
            ),
            "cuda",
        ),
        (Program((replace(spec, device="cpu"),), (relu,), (1,), payloads={}), "cpu"),
    ):
        build_runner(program, "inductor", torch.device(device))
    assert ["cpp.cxx" in patches for patches in recorded] == [True, False, False]
    build_runner(
        Program((spec,), (relu,), (1,), payloads={}),
        "inductor",
        torch.device("cuda"),
        options={"cpp.cxx": (None, "mine")},
    )
    assert recorded[-1]["cpp.cxx"] == (None, "mine")


def test_a_cuda_graph_is_refused_where_it_cannot_serve():
    with pytest.raises(NotLowerableError, match="CUDA device"):
        build_runner(TANH, "eager+graph", CPU)
    noise = Program((SPEC,), (Aten("aten.rand_like.default", (Value(0),), (), (1,)),), (1,))
    with pytest.raises(NotLowerableError, match="repeat"):
        build_runner(noise, "eager+graph", torch.device("cuda"))
    with pytest.raises(NotLowerableError, match="would keep the value"):
        build_runner(TANH, "eager+graph", torch.device("cuda"))
