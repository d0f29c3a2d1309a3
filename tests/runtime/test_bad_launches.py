# ruff: noqa: F811  fixtures of another file are arguments here
"""A stored kernel that the driver refuses costs nothing but itself: its name and the reason are
reported, and the module runs as it is.

End to end, with `test_driver`'s recording library in place of the driver and CPU tensors in place
of device memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_cudal1
from tests.device.test_cubin import ADD, HIDDEN, build  # noqa: F401  (fixtures, here and below)
from tests.device.test_driver import GPU, add, cuda, number, recorder_path  # noqa: F401
from tests.entries import plant
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import DriverError
from torch_cudal1.device.cuda import driver
from torch_cudal1.ir.program import Alloc, Launch, LaunchArg, Program, TensorSpec, Value

pytestmark = pytest.mark.usefixtures("inference")

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def launching(program: Program, cubin: torch.Tensor, changes: dict[str, Any]) -> Program:
    """`program` with a launch of add_kernel behind it, into memory of its own."""
    out = program.value_count
    pointers = (LaunchArg("ptr", Value(out)),) * 3
    launch = dataclasses.replace(
        ADD,
        args=(
            *pointers,
            LaunchArg("i32", 500),
            LaunchArg("i64", 0),
            LaunchArg("fp32", 2.0),
            *HIDDEN,
        ),
    )
    steps = (
        *program.steps,
        Alloc(out, TensorSpec("float32", (500,), (1,), "cpu")),
        dataclasses.replace(launch, **changes),
    )
    return dataclasses.replace(program, steps=steps, payloads={**program.payloads, "p": cubin})


@pytest.fixture
def accelerate_cached(
    cuda: Any, add: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Accelerates a net from a cache that holds such a Program; only who loads a kernel believes
    that there is a GPU.
    """
    load = driver.load_launch

    def load_on_recorder(
        cubin: torch.Tensor, launch: Launch, device: torch.device
    ) -> driver.LoadedLaunch:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            return load(cubin, launch, GPU)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver, "load_launch", load_on_recorder)

    def make(cubin: int | bytes = 1 << 30, **changes: Any) -> nn.Module:
        code = (
            torch.frombuffer(bytearray(cubin), dtype=torch.uint8)
            if cubin
            else torch.zeros(0, dtype=torch.uint8)
        )
        if isinstance(cubin, int):
            code = add[:cubin]
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        plant(net, X, tmp_path, change=lambda program: launching(program, code, changes))
        torch_cudal1.accelerate(net, X, cache_dir=tmp_path, strictness="silent")
        return net

    return make


def refusal() -> str:
    """The reason of the one fallback to the module itself."""
    (reason,) = [
        str(event.facts["reason"])
        for event in telemetry.report().events
        if event.what == "fallback"
    ]
    return reason


def test_such_a_program_launches(accelerate_cached, cuda):
    net = accelerate_cached()
    for count in (1, 2, 3):
        assert torch.equal(net(X), net._call_impl(X))
        assert number(cuda, "calls_launch") == count
    assert telemetry.report().counters.get("fallbacks", 0) == 0


MISFITS: dict[str, tuple[dict[str, Any], str]] = {  # what differs in the launch, what is said
    "missing symbol": (
        {"symbol": "no_such"},
        "kernel 'no_such': no kernel 'no_such'; there are ['add_kernel']",
    ),
    "block": ({"block": 64}, "requires a block of (128, 1, 1), the plan has (64, 1, 1)"),
    "truncated": (
        {"cubin": 100},
        "kernel 'add_kernel': needs bytes 4688 to 4752 of 100: truncated or damaged",
    ),
    "random bytes": ({"cubin": b"random" * 500}, "expected a 64-bit little-endian ELF"),
    "no bytes": ({"cubin": b""}, "expected a 64-bit little-endian ELF"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_machine_code_that_does_not_fit_is_named_and_the_module_runs_as_it_is(
    name, accelerate_cached, cuda, add
):
    changes, words = MISFITS[name]
    net = accelerate_cached(**changes)
    for _ in range(2):
        assert torch.equal(net(X), net._call_impl(X))
    assert words in refusal()
    assert "kernel '" in refusal()
    assert number(cuda, "calls_launch") == 0


def test_machine_code_for_another_architecture_is_named_and_the_module_runs_as_it_is(
    accelerate_cached, cuda
):
    cuda.capability = (8, 0)
    net = accelerate_cached()
    assert torch.equal(net(X), net._call_impl(X))
    assert "kernel 'add_kernel': machine code for sm_90, expected sm_80" in refusal()


@pytest.mark.parametrize(
    ("switch", "result", "status"),
    [
        ("fail_load", 209, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ("fail_launch", 12345, "result 12345"),
        ("fail_stream", 1, "error 1"),
    ],
)
def test_what_the_driver_refuses_is_named_and_the_module_runs_as_it_is(
    switch, result, status, accelerate_cached, cuda
):
    ctypes.c_int.in_dll(cuda.library, switch).value = result
    net = accelerate_cached()
    for _ in range(3):
        assert torch.equal(net(X), net._call_impl(X))
    assert status in refusal()
    assert "kernel 'add_kernel'" in refusal() or switch == "fail_stream"
    assert number(cuda, "calls_launch") == 0


def test_a_lost_device_is_an_error_with_the_kernel_s_name(accelerate_cached, cuda):
    net = accelerate_cached()
    net(X)
    net(X)
    for switch in ("fail_launch", "fail_replay"):  # a launch whose addresses come back is a graph
        ctypes.c_int.in_dll(cuda.library, switch).value = 719
    for _ in range(2):
        with pytest.raises(DriverError, match="CUDA_ERROR_LAUNCH_FAILED; kernel 'add_kernel'"):
            net(X)
    assert (
        telemetry.report().counters.get("fallbacks", 0) == 0
    )  # nothing that runs after this can be trusted
