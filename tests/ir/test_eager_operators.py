"""A Program that runs step by step calls what eager calls, not what tracing made of it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.executors import assert_same
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir import interpreter
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.runtime import executor

CPU = torch.device("cpu")
TRACED = "aten._native_batch_norm_legit_no_training.default"


class OperatorRecorder(TorchDispatchMode):
    """The names of the operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def norm(
    device: torch.device, outputs: tuple[int, ...] = (5,)
) -> tuple[Program, list[torch.Tensor]]:
    """A batch norm in inference as it is traced, of (input, weight, bias, mean, variance)."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 9, 9), *(torch.rand(4) + 0.5 for _ in range(4))]
    inputs = [tensor.to(device) for tensor in inputs]
    step = Aten(TRACED, (*map(Value, range(5)), 0.1, 1e-5), (), (5, 6, 7), many=True)
    return Program(tuple(map(TensorSpec.of, inputs)), (step,), outputs, payloads={}), inputs


def eager(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
) -> torch.Tensor:
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.1, 1e-5)


@pytest.mark.parametrize("python", [False, True], ids=["C++", "Python"])
def test_a_batch_norm_in_inference_is_eager_s_operator(python, monkeypatch):
    if python:
        monkeypatch.setattr(executor, "compile_program", lambda *_: Refusal("the test says so"))
    program, inputs = norm(CPU)
    run = executor.prepare(program, CPU)
    with torch.no_grad():
        with OperatorRecorder() as calls:
            results = run(inputs)
        assert_same(results, [eager(*inputs)], inputs)
    assert TRACED not in calls.names
    assert [name for name in calls.names if "batch_norm" in name]


def test_results_that_are_read_are_computed_as_they_were_traced():
    program, inputs = norm(CPU, outputs=(5, 6))
    assert_same(
        executor.prepare(program, CPU)(inputs), interpreter.interpret(program, CPU)(inputs), inputs
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_it_launches_the_kernels_that_eager_launches():
    device = torch.device("cuda", 0)
    program, inputs = norm(device)
    run = executor.prepare(program, device)
    with torch.no_grad():
        assert torch.equal(run(inputs)[0], eager(*inputs))
        assert kernels(lambda: run(inputs)) == kernels(lambda: eager(*inputs)) != []


def kernels(call) -> list[str]:
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [
        event.name
        for event in profile.events()
        if "Memcpy" not in event.name and "Synchronize" not in event.name
    ]
