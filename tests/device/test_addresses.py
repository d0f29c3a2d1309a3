# ruff: noqa: F811  fixtures of another file are arguments here
"""The C++ extension gets addresses of functions that are there, launches byte for byte, and
exceptions that name the value, the kernel and the driver's function.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from typing import Any

import pytest
import torch

from tests.device.test_cubin import ADD, HIDDEN, POINTERS, build  # noqa: F401
from tests.device.test_driver import GPU, add, cuda, recorder_path  # noqa: F401
from torch_cudal1.core.errors import DriverError, ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda import addresses, driver
from torch_cudal1.device.cuda.addresses import (
    find_launch_addresses,
    find_replay_addresses,
    find_timer_addresses,
    pack_launch,
    raise_driver_error,
    raise_launch_failure,
)
from torch_cudal1.ir.program import Launch, LaunchArg


def find_function(cuda: Any, name: str) -> int | None:
    return ctypes.cast(getattr(cuda.library, name), ctypes.c_void_p).value


def load(cubin: torch.Tensor, **changes: Any) -> driver.LoadedLaunch:
    return driver.load_launch(cubin, dataclasses.replace(ADD, **changes), GPU)


def test_a_launch_gets_its_context_the_driver_s_functions_and_pytorch_s_stream(
    cuda: Any, add: torch.Tensor
) -> None:
    loaded = load(add)
    context, launch, current, push, pop, stream, *graphs = find_launch_addresses(loaded)
    assert context == loaded.context.value
    assert launch == find_function(cuda, "cuLaunchKernelEx")
    assert (current, push, pop) == tuple(
        find_function(cuda, f"cuCtx{name}")
        for name in ("GetCurrent", "PushCurrent_v2", "PopCurrent_v2")
    )
    assert stream == find_function(cuda, "aoti_torch_get_current_cuda_stream")
    assert graphs == [find_function(cuda, name) for name in addresses._GRAPHS]


def test_a_driver_without_graphs_still_launches(
    cuda: Any, add: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_GRAPHS", ("cuGraphLaunch", "cuGraphOfALaterDriver"))
    assert find_launch_addresses(load(add))[-2:] == (find_function(cuda, "cuGraphLaunch"), 0)


def test_a_pytorch_without_the_stream_function_is_a_refusal_that_names_it(
    cuda: Any, add: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(add)
    monkeypatch.setattr(addresses, "_STREAM_FUNCTION", "no_such_function")
    for refusal in (
        find_launch_addresses(loaded),
        find_replay_addresses(GPU),
        find_timer_addresses(GPU),
    ):
        assert isinstance(refusal, Refusal)
        assert "has no no_such_function" in refusal.reason
    monkeypatch.setattr(addresses, "_STREAM_LIBRARY", "libtorch_that_is_not_there.so")
    refusal = find_timer_addresses(GPU)
    assert isinstance(refusal, Refusal)
    assert "libtorch_that_is_not_there.so is not loaded" in refusal.reason


@pytest.mark.parametrize(
    ("find", "table"), [(find_timer_addresses, "_TIMER"), (find_replay_addresses, "_REPLAY")]
)
def test_a_driver_that_lacks_a_function_is_a_refusal_that_names_it(
    find: Any, table: str, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, table, ("cuCtxGetCurrent", "cuOfALaterDriver"))
    assert find(GPU) == Refusal("the CUDA driver lacks cuOfALaterDriver; update it")


def test_a_timer_gets_functions_in_the_order_that_its_c_code_reads(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_TIMER", ("cuEventRecord", "cuEventCreate"))
    assert find_timer_addresses(GPU) == (
        driver.open_driver().retain_context(1).value,
        *(find_function(cuda, f"cuCtx{name}Current_v2") for name in ("Push", "Pop")),
        find_function(cuda, "aoti_torch_get_current_cuda_stream"),
        *(find_function(cuda, name) for name in ("cuEventRecord", "cuEventCreate")),
    )


def test_a_device_without_an_index_is_the_current_one(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_TIMER", ())
    assert find_timer_addresses(torch.device("cuda")) == find_timer_addresses(GPU)
    assert find_timer_addresses(torch.device("cuda", 0)) != find_timer_addresses(GPU)


def test_a_packed_launch_has_geometry_bits_of_scalars_and_masks_of_pointers(
    cuda: Any, add: torch.Tensor
) -> None:
    args = (
        *POINTERS,
        LaunchArg("i32", -500),
        LaunchArg("i64", -(2**40)),
        LaunchArg("fp32", 0.1),
        *HIDDEN,
    )
    loaded = load(add, args=args, grid=(5, 3, 2), shared_bytes=640, aligned=(0, 2))
    symbol, function, grid, block, shared_bytes, attributes, words, pointers = pack_launch(loaded)
    assert (symbol, function) == ("add_kernel", loaded.function.value)
    assert (grid, block, shared_bytes, attributes) == ((5, 3, 2), 128, 640, [])
    assert words[3] & 0xFFFFFFFF == 2**32 - 500
    assert words[4] == 2**64 - 2**40
    assert words[5] & 0xFFFFFFFF == int.from_bytes(struct.pack("<f", 0.1), "little")
    assert pointers == [(0, 0, 15), (1, 1, 0), (2, 2, 15)]


def test_a_packed_cluster_multiplies_the_grid(cuda: Any, build: Any) -> None:
    cubin = torch.frombuffer(bytearray(build("dot", 90, num_ctas=2)), dtype=torch.uint8)
    ctypes.c_int.in_dll(cuda.library, "param_count").value = 5
    launch = Launch("p", "dot_kernel", (3, 1, 1), 128, 1024, (*POINTERS, *HIDDEN), cluster=2)
    _, _, grid, _, _, attributes, _, _ = pack_launch(driver.load_launch(cubin, launch, GPU))
    assert grid == (6, 1, 1)
    assert len(attributes) == 2  # the cluster's dimensions, and its scheduling policy


@pytest.mark.parametrize(
    ("kind", "rule", "words"),
    [
        (0, "device", "kernel 'k': value 7 is absent"),
        (1, "device", "kernel 'k': value 7 is on device 24"),
        (2, "alignment", "kernel 'k': value 7 starts at 0x18, expected a multiple of 16 bytes"),
    ],
)
def test_a_misplaced_value_is_an_error_of_the_program(kind: int, rule: str, words: str) -> None:
    with pytest.raises(ProgramError) as raised:
        raise_launch_failure(kind, "k", 7, 24)
    assert raised.value.rule == rule
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "call"),
    [(3, "cuLaunchKernelEx"), (5, "cuCtxGetCurrent"), (4, "aoti_torch_get_current_cuda_stream")],
)
def test_a_failed_call_is_an_error_of_the_driver_with_its_name(
    kind: int, call: str, cuda: Any
) -> None:
    with pytest.raises(DriverError) as raised:
        raise_launch_failure(kind, "", 0, 700)
    assert raised.value.call == call
    assert "700" in raised.value.status or "ILLEGAL_ADDRESS" in raised.value.status
    assert "the launches of this Program" in raised.value.hint
    with pytest.raises(DriverError, match="cuEventRecord"):
        raise_driver_error("cuEventRecord", 700)
