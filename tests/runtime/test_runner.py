"""Executors and schedules: the same Program gives the same result step by step, through the
operator and through Inductor.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.ir.interpreter import interpret, skip_launch
from torch_cudal1.ir.program import Alloc, Aten, Call, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.ir.value_specs import output_specs, value_specs
from torch_cudal1.runtime.executor import prepare
from torch_cudal1.runtime.operator import register, run_operator
from torch_cudal1.runtime.runner import build_runner

CPU = torch.device("cpu")
SPEC = TensorSpec("float32", (6, 6), (6, 1), "cpu")
TANH = Program((SPEC,), (Aten("aten.tanh.default", (Value(0),), (), (1,)),), (1,))
WHOLE = Program(
    (SPEC, SPEC),
    (
        Aten("aten.mm.default", (Value(0), Value(1)), (), (3,)),
        Call(TANH, (3,), (4,)),
        Aten("aten.split.Tensor", (Value(4), 3), (), (5, 6), many=True),
        Aten("aten.cat.default", ((Value(6), Value(5), Value(2)),), (), (7,)),
    ),
    (7, 5, None),
    constants=("c",),
    payloads={"c": torch.full((1, 6), 2.0)},
)


def expected(x, y):
    top, bottom = torch.tanh(x @ y).split(3)
    return torch.cat([bottom, top, torch.full((1, 6), 2.0)]), top


@pytest.mark.parametrize("schedule", ["eager", "inductor"])
def test_schedules_agree_with_eager(schedule):
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    with torch.no_grad():
        whole, top, nothing = build_runner(WHOLE, schedule, CPU)([x, y])
    wanted = expected(x, y)
    torch.testing.assert_close((whole, top), wanted, rtol=1e-6, atol=1e-6)
    assert nothing is None


def test_the_operator_passes_opcheck():
    program = register(TANH)
    torch.library.opcheck(
        run_operator(),
        ([torch.randn(6, 6)], program),
        test_utils=("test_schema", "test_faketensor"),
    )


class Calls(torch.nn.Module):
    """tanh, as the operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = run_operator()([x], register(TANH))[0]
        return result


def test_export_keeps_the_operator_as_one_node():
    exported = torch.export.export(Calls(), (torch.randn(6, 6),))
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


def test_shapes_come_without_launching():
    spec = TensorSpec("float16", (8, 4), (4, 1), "cpu")
    launch = Launch(
        "k", "kernel", (1, 1, 1), 32, 0, (LaunchArg("ptr", Value(0)), LaunchArg("ptr", Value(1)))
    )
    program = Program(
        (SPEC,), (Alloc(1, spec), launch), (1,), payloads={"k": torch.zeros(4, dtype=torch.uint8)}
    )
    assert output_specs(program) == [spec]
    assert interpret(program, CPU, launcher=skip_launch)([torch.ones(6, 6)])[0].shape == (8, 4)
    assert value_specs(WHOLE)[5] == TensorSpec("float32", (3, 6), (6, 1), "cpu")


@pytest.mark.parametrize("executor", [prepare, interpret])
def test_values_die_when_nobody_needs_them_any_more(executor):
    steps = tuple(
        Aten("aten.neg.default", (Value(index),), (), (index + 1,)) for index in range(50)
    )
    run = executor(Program((SPEC,), steps, (50,)), CPU)
    results: list[weakref.ref[torch.Tensor]] = []
    most = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal most
            out = function(*args, **(kwargs or {}))
            results.append(weakref.ref(out))
            most = max(most, sum(ref() is not None for ref in results))
            return out

    with Watch():
        (result,) = run([torch.ones(6, 6)])
    assert torch.equal(result, torch.ones(6, 6))
    assert most <= 3


def test_what_is_compiled_for_a_gpu_does_not_depend_on_the_c_compiler_s_name(monkeypatch):
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx",
        lambda module, inputs, config_patches: asked.append(config_patches),
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
    assert ["cpp.cxx" in patches for patches in asked] == [True, False, False]
    build_runner(
        Program((spec,), (relu,), (1,), payloads={}),
        "inductor",
        torch.device("cuda"),
        options={"cpp.cxx": (None, "mine")},
    )
    assert asked[-1]["cpp.cxx"] == (None, "mine")


def test_a_cuda_graph_is_refused_where_it_cannot_serve():
    with pytest.raises(NotLowerableError, match="CUDA device"):
        build_runner(TANH, "eager+graph", CPU)
    noise = Program((SPEC,), (Aten("aten.rand_like.default", (Value(0),), (), (1,)),), (1,))
    with pytest.raises(NotLowerableError, match="repeat"):
        build_runner(noise, "eager+graph", torch.device("cuda"))
    with pytest.raises(NotLowerableError, match="would keep the value"):
        build_runner(TANH, "eager+graph", torch.device("cuda"))
