"""A Program is prepared for the C++ executor where that can run it, and for the interpreter with the
reason where it cannot.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.executors import MIXED_STEPS, SPEC, TANH, compute_mixed_steps
from torch_cudal1.core import native, telemetry
from torch_cudal1.core.errors import Cudal1Error, DriverError, ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda import driver
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Alloc, Aten, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.runtime import executor
from torch_cudal1.runtime.executor import launch_through_driver, prepare

CPU = torch.device("cpu")


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("python", [False, True], ids=["C++", "Python"])
def test_the_executor_that_runs_a_program_is_reported(
    python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if python:
        monkeypatch.setattr(executor, "compile_program", lambda *_: Refusal("the test says so"))
    elif native.extension() is None:
        pytest.skip(f"no C++ executor: {native.status()[1]}")
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    joined, top, absent = prepare(MIXED_STEPS, CPU)([x, y])
    torch.testing.assert_close((joined, top), compute_mixed_steps(x, y), rtol=1e-6, atol=1e-6)
    assert absent is None
    report = telemetry.report()
    reasons = [event.facts["reason"] for event in report.events if event.what == "interpreted"]
    assert reasons == (["the test says so"] if python else [])
    assert report.counters.get("programs_compiled", 0) == (0 if python else 1)


@pytest.mark.parametrize("executor_name", ["compile_program", "interpret_steps"])
def test_steps_of_constants_are_computed_before_the_first_call(
    executor_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = (
        Aten("aten.exp.default", (Value(1),), (), (2,)),
        Aten("aten.add.Tensor", (Value(0), Value(2)), (), (3,)),
    )
    program = Program((SPEC,), steps, (3,), constants=("c",), payloads={"c": torch.zeros(1, 6)})
    programs: list[Program] = []
    plain = getattr(executor, executor_name)
    if executor_name == "interpret_steps":
        monkeypatch.setattr(executor, "compile_program", lambda *_: Refusal("the test says so"))
    monkeypatch.setattr(
        executor,
        executor_name,
        lambda program, *rest: (programs.append(program), plain(program, *rest))[1],
    )
    (result,) = prepare(program, CPU)([torch.ones(6, 6)])
    assert torch.equal(result, torch.full((6, 6), 2.0))
    assert [step.target for step in programs[0].steps] == ["aten.add.Tensor"]  # type: ignore[union-attr]


def test_a_program_that_breaks_a_rule_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "compile_program", lambda *_: pytest.fail("it was compiled"))
    with pytest.raises(ProgramError):
        prepare(replace(TANH, outputs=(5,)), CPU)


def test_a_kernel_without_a_driver_is_an_error_when_the_program_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver._open_library.cache_clear()
    monkeypatch.setattr(driver, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    spec = TensorSpec("float32", (6, 6), (6, 1), "cuda")
    pointers = tuple(LaunchArg("ptr", Value(index)) for index in range(2))
    launch = Launch("k", "kernel", (1, 1, 1), 32, 0, pointers)
    program = Program(
        (spec,), (Alloc(1, spec), launch), (1,), payloads={"k": torch.zeros(4, dtype=torch.uint8)}
    )
    try:
        with pytest.raises(Cudal1Error, match="libcuda-that-is-not-there"):
            prepare(program, torch.device("cuda", 0))
        with pytest.raises(DriverError, match="need an NVIDIA driver"):
            launch_through_driver(program.payloads["k"], launch, torch.device("cuda", 0))
    finally:
        driver._open_library.cache_clear()


@pytest.mark.parametrize("make_runner", [prepare, interpret])
def test_values_die_after_their_last_use(make_runner):
    steps = tuple(
        Aten("aten.neg.default", (Value(index),), (), (index + 1,)) for index in range(50)
    )
    run = make_runner(Program((SPEC,), steps, (50,)), CPU)
    results: list[weakref.ref[torch.Tensor]] = []
    most_alive = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal most_alive
            out = function(*args, **(kwargs or {}))
            results.append(weakref.ref(out))
            most_alive = max(most_alive, sum(ref() is not None for ref in results))
            return out

    with Watch():
        (result,) = run([torch.ones(6, 6)])
    assert torch.equal(result, torch.ones(6, 6))
    assert most_alive <= 3
