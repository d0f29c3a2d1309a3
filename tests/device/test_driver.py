# ruff: noqa: F811  fixtures of another file are arguments here
"""A launch reaches the driver with exactly the planned geometry and parameter bytes, and every
refusal has a name.

There is no GPU here: the driver is a small C library that records what it gets, compiled against
NVIDIA's own cuda.h (it comes with Triton), so structure layouts and calling conventions are the
real ones. Streams and devices of PyTorch are stand-ins.
"""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.device.test_cubin import ADD, HIDDEN, POINTERS, build  # noqa: F401  (build is a fixture)
from torch_cudal1.core.errors import DriverError, ProgramError
from torch_cudal1.device.cuda import addresses, driver
from torch_cudal1.device.cuda.driver import driver_status, prepare_launch
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Alloc, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.runtime.executor import launch_through_driver

RECORDER = Path(__file__).with_name("recorder.c")
SIZES = (8, 8, 8, 4, 8, 4, 8, 8)  # of add_kernel
STREAM = 0xABC0
GPU = torch.device("cuda", 1)


class Placed:
    """A stand-in for a CUDA tensor: an address and a device, which is all a launch looks at."""

    def __init__(self, address: int, device: int = 1) -> None:
        self.address, self.device = address, device

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device


@pytest.fixture(scope="module")
def recorder_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    triton = pytest.importorskip("triton", reason="its wheel carries cuda.h")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the recording driver")
    folder = tmp_path_factory.mktemp("driver")
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    path = folder / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-I{include}", str(RECORDER), "-o", str(path)], check=True
    )
    return path


@pytest.fixture
def cuda(recorder_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fresh recording driver in place of libcuda, and a PyTorch that believes in an H200."""
    fresh = tmp_path / "libcuda.so.1"
    shutil.copy(recorder_path, fresh)  # a copy has its own counters
    state = SimpleNamespace(capability=(9, 0), capturing=False, stream=STREAM)
    monkeypatch.setattr(driver, "_LIBRARY", str(fresh))
    monkeypatch.setattr(addresses, "_STREAM_LIBRARY", str(fresh))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: state.capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: SimpleNamespace(cuda_stream=state.stream + device.index),
    )
    driver._open_library.cache_clear()
    driver.open_driver.cache_clear()
    library = driver._open_library()
    for place, size in enumerate(SIZES):
        (ctypes.c_int * 32).in_dll(library, "param_sizes")[place] = size
    library.stream.restype = ctypes.c_void_p
    state.library = library
    yield state
    driver._open_library.cache_clear()
    driver.open_driver.cache_clear()


def number(cuda: Any, name: str) -> int:
    return ctypes.c_int.in_dll(cuda.library, name).value


def pointer(cuda: Any, name: str) -> int | None:
    return ctypes.c_void_p.in_dll(cuda.library, name).value


def parameters(cuda: Any, count: int = 8) -> list[bytes]:
    raw = (ctypes.c_ubyte * 8 * 32).in_dll(cuda.library, "param_bytes")
    return [bytes(raw[i])[: SIZES[i]] for i in range(count)]


def geometry(cuda: Any) -> tuple[int, ...]:
    return tuple(cuda.library.geometry(i) for i in range(8))


@pytest.fixture
def add(build: Any) -> torch.Tensor:
    """The machine code of add_kernel for sm_90, at an odd offset as in a file."""
    return torch.frombuffer(bytearray(b"x" + build("add", 90)), dtype=torch.uint8)[1:]


VALUES = [Placed(0x7F0000001000), Placed(0x7F0000002008), Placed(0x7F0000003000)]


# Launching
# ---------------------------------------------------------------------------------------------------------------------


def test_structures_and_numbers_are_those_of_the_header(cuda: Any) -> None:
    assert ctypes.sizeof(driver._LaunchConfig) == number(cuda, "size_config") == 56
    assert ctypes.sizeof(driver._LaunchAttribute) == number(cuda, "size_attribute") == 72
    assert list((ctypes.c_int * 5).in_dll(cuda.library, "numbers")) == [
        driver._MAX_DYNAMIC_SHARED_SIZE_BYTES,
        driver._NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
        driver._CLUSTER_DIMENSION,
        driver._CLUSTER_SCHEDULING_POLICY_PREFERENCE,
        driver._SPREAD,
    ]


def test_parameters_arrive_byte_for_byte(cuda: Any, add: torch.Tensor) -> None:
    big = -(2**40) - 3
    args = (
        *POINTERS,
        LaunchArg("i32", -500),
        LaunchArg("i64", big),
        LaunchArg("fp32", 0.1),
        *HIDDEN,
    )
    prepare_launch(add, dataclasses.replace(ADD, args=args), GPU)(VALUES)
    expected = [struct.pack("<Q", v.address) for v in VALUES]
    expected += [
        struct.pack("<i", -500),
        struct.pack("<q", big),
        struct.pack("<f", 0.1),
        b"\0" * 8,
        b"\0" * 8,
    ]
    assert parameters(cuda) == expected


def test_geometry_stream_and_context_arrive(cuda: Any, add: torch.Tensor) -> None:
    prepare_launch(add, dataclasses.replace(ADD, grid=(5, 3, 2), shared_bytes=640), GPU)(VALUES)
    assert geometry(cuda) == (5, 3, 2, 128, 1, 1, 640, 0)
    assert cuda.library.stream() == STREAM + 1
    assert pointer(cuda, "context_at_launch") == 0xC0DE00000000 + 101
    assert pointer(cuda, "launched_function") == 0x1000000001 << 4
    assert (
        bytes((ctypes.c_char * 64).in_dll(cuda.library, "symbols")).rstrip(b"\0") == b"add_kernel"
    )


def test_each_call_uses_its_own_pointers_and_the_stream_of_the_moment(
    cuda: Any, add: torch.Tensor
) -> None:
    run = prepare_launch(add, ADD, GPU)
    run(VALUES)
    cuda.stream = 0x5000
    run([Placed(0x10), Placed(0x20), Placed(0x30)])
    assert parameters(cuda)[:4] == [struct.pack("<Q", a) for a in (0x10, 0x20, 0x30)] + [
        struct.pack("<i", 500)
    ]
    assert cuda.library.stream() == 0x5001
    assert number(cuda, "calls_launch") == 2


def test_values_are_taken_by_number(cuda: Any, add: torch.Tensor) -> None:
    args = tuple(LaunchArg("ptr", Value(i)) for i in (4, 0, 4)) + ADD.args[3:]
    prepare_launch(add, dataclasses.replace(ADD, args=args), GPU)(
        [VALUES[0], None, None, None, VALUES[2]]
    )
    assert parameters(cuda)[:3] == [struct.pack("<Q", VALUES[i].address) for i in (2, 0, 2)]


def test_a_cluster_multiplies_the_grid_and_is_announced(cuda: Any, build: Any) -> None:
    cubin = torch.frombuffer(bytearray(build("dot", 90, num_ctas=2)), dtype=torch.uint8)
    ctypes.c_int.in_dll(cuda.library, "param_count").value = 5
    launch = Launch("p", "dot_kernel", (3, 1, 1), 128, 1024, (*POINTERS, *HIDDEN), cluster=2)
    prepare_launch(cubin, launch, GPU)(VALUES)
    assert geometry(cuda) == (6, 1, 1, 128, 1, 1, 1024, 2)
    attributes = (driver._LaunchAttribute * 4).in_dll(cuda.library, "launch_attributes")
    assert [a.id for a in attributes[:2]] == [4, 5]
    assert (cuda.library.cluster_x(), cuda.library.cluster_y(), cuda.library.cluster_z()) == (
        2,
        1,
        1,
    )
    assert cuda.library.policy() == 1
    assert number(cuda, "attribute_count") == 0


def test_much_shared_memory_is_opted_in_and_never_lowered_again(
    cuda: Any, add: torch.Tensor
) -> None:
    for size in (49152, 100_000, 60_000, 120_000):
        prepare_launch(add, dataclasses.replace(ADD, shared_bytes=size), GPU)
    count = number(cuda, "attribute_count")
    assert list((ctypes.c_int * 32).in_dll(cuda.library, "attribute_values"))[:count] == [
        100_000,
        120_000,
    ]
    assert list((ctypes.c_int * 32).in_dll(cuda.library, "attribute_ids"))[:count] == [8, 8]


def test_a_module_is_loaded_once_per_device_before_the_first_launch(
    cuda: Any, add: torch.Tensor
) -> None:
    for device in (GPU, torch.device("cuda"), GPU, torch.device("cuda", 0)):
        prepare_launch(add.clone(), ADD, device)
    assert number(cuda, "calls_load") == 2
    assert number(cuda, "load_aligned") == 1
    assert number(cuda, "calls_func_load") == 4
    assert (number(cuda, "calls_init"), number(cuda, "calls_launch")) == (1, 0)
    assert number(cuda, "calls_push") == number(cuda, "calls_pop")


def test_a_context_that_is_already_current_is_not_pushed(cuda: Any, add: torch.Tensor) -> None:
    run = prepare_launch(add, ADD, GPU)
    before = number(cuda, "calls_push")
    run(VALUES)
    assert number(cuda, "calls_push") == before + 1
    cuda.library.cuCtxPushCurrent_v2(ctypes.c_void_p(0xC0DE00000000 + 101))
    run(VALUES)
    assert number(cuda, "calls_push") == before + 2
    cuda.library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def test_threads_do_not_share_parameters(cuda: Any, add: torch.Tensor) -> None:
    run = prepare_launch(add, ADD, GPU)
    inside, go = threading.Barrier(2), threading.Event()

    class Waiting(Placed):
        """Holds its thread in the middle of the packing until the other thread has packed and
        launched.
        """

        def data_ptr(self) -> int:
            inside.wait(60)
            go.wait(60)
            return self.address

    slow = threading.Thread(target=run, args=([VALUES[0], VALUES[1], Waiting(0x30)],))
    slow.start()
    inside.wait(60)
    run([Placed(0x111), Placed(0x222), Placed(0x333)])
    assert parameters(cuda)[0] == struct.pack("<Q", 0x111)
    go.set()
    slow.join(60)
    assert parameters(cuda)[:3] == [
        struct.pack("<Q", a) for a in (VALUES[0].address, VALUES[1].address, 0x30)
    ]


def test_a_program_launches_through_the_executor(
    cuda: Any, add: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TensorSpec("float32", (500,), (1,), "cuda")
    program = Program(
        (spec, spec),
        (Alloc(2, spec), dataclasses.replace(ADD, aligned=(0, 1, 2))),
        (2,),
        payloads={"p": add},
    )
    allocated = Placed(0x9000)
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **kwargs: allocated)
    inputs: list[Any] = [Placed(0x7000), Placed(0x8000)]
    assert interpret(program, GPU, launcher=launch_through_driver)(inputs) == [allocated]
    assert parameters(cuda)[:3] == [struct.pack("<Q", a) for a in (0x7000, 0x8000, 0x9000)]


# Refusals
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [1, 4, 8, 15])
def test_a_misaligned_pointer_is_stopped_only_where_the_kernel_assumes_alignment(
    cuda: Any, add: torch.Tensor, offset: int
) -> None:
    values = [Placed(0x1000), Placed(0x2000 + offset), Placed(0x3000)]
    prepare_launch(add, dataclasses.replace(ADD, aligned=(0, 2)), GPU)(values)
    with pytest.raises(ProgramError, match="multiple of 16") as caught:
        prepare_launch(add, dataclasses.replace(ADD, aligned=(0, 1, 2)), GPU)(values)
    assert caught.value.rule == "alignment"
    assert "value 1" in caught.value.found
    assert number(cuda, "calls_launch") == 1


@pytest.mark.parametrize(
    "value", [None, Placed(0x2000, 0), Placed(0x2000, -1)], ids=["absent", "other GPU", "CPU"]
)
def test_a_tensor_elsewhere_is_stopped(cuda: Any, add: torch.Tensor, value: Placed | None) -> None:
    with pytest.raises(ProgramError, match=r"value 1 is .*expected a tensor on cuda:1"):
        prepare_launch(add, ADD, GPU)([VALUES[0], value, VALUES[2]])
    assert number(cuda, "calls_launch") == 0


MISFITS = {
    "block": (dataclasses.replace(ADD, block=64), (9, 0), "cubin_block"),
    "symbol": (dataclasses.replace(ADD, symbol="other"), (9, 0), "cubin_symbol"),
    "device": (ADD, (8, 0), "cubin_sm"),
    "int range": (
        dataclasses.replace(ADD, args=(*POINTERS, LaunchArg("i32", 2**31), *ADD.args[4:])),
        (9, 0),
        "launch",
    ),
    "grid": (dataclasses.replace(ADD, grid=(2**31, 1, 1)), (9, 0), "launch"),
    "negative grid": (dataclasses.replace(ADD, grid=(-1, 1, 1)), (9, 0), "launch"),
}


@pytest.mark.parametrize(("launch", "capability", "rule"), MISFITS.values(), ids=MISFITS)
def test_a_launch_that_does_not_fit_never_reaches_the_driver(
    cuda: Any, add: torch.Tensor, launch: Launch, capability: tuple[int, int], rule: str
) -> None:
    cuda.capability = capability
    with pytest.raises(ProgramError) as caught:
        prepare_launch(add, launch, GPU)
    assert caught.value.rule == rule
    assert number(cuda, "calls_launch") == 0


def test_loading_during_capture_is_refused_and_launching_is_not(
    cuda: Any, add: torch.Tensor
) -> None:
    cuda.capturing = True
    with pytest.raises(ProgramError, match="before capturing"):
        prepare_launch(add, ADD, GPU)
    cuda.capturing = False
    run = prepare_launch(add, ADD, GPU)
    cuda.capturing = True
    run(VALUES)
    assert number(cuda, "calls_launch") == 1


@pytest.mark.parametrize(
    ("switch", "result", "call", "status"),
    [
        ("fail_load", 209, "cuModuleLoadData", "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ("fail_launch", 719, "cuLaunchKernelEx", "CUDA_ERROR_LAUNCH_FAILED"),
        ("fail_launch", 12345, "cuLaunchKernelEx", "result 12345"),
    ],
)
def test_every_result_but_success_is_an_error_with_its_name(
    cuda: Any, add: torch.Tensor, switch: str, result: int, call: str, status: str
) -> None:
    ctypes.c_int.in_dll(cuda.library, switch).value = result
    with pytest.raises(DriverError) as caught:
        prepare_launch(add, ADD, GPU)(VALUES)
    assert (caught.value.call, caught.value.status) == (call, status)
    assert number(cuda, "calls_push") == number(cuda, "calls_pop")
    ctypes.c_int.in_dll(cuda.library, switch).value = 0
    prepare_launch(add, ADD, GPU)(VALUES)
    assert number(cuda, "calls_launch") == 1


def test_more_shared_memory_than_the_device_has_is_an_error(cuda: Any, add: torch.Tensor) -> None:
    with pytest.raises(DriverError, match="more than this GPU allows"):
        prepare_launch(add, dataclasses.replace(ADD, shared_bytes=300_000), GPU)


# Without a driver
# --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def other_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    driver._open_library.cache_clear()
    yield lambda name: monkeypatch.setattr(driver, "_LIBRARY", name)
    driver._open_library.cache_clear()


def test_no_driver_is_an_answer_with_its_reason(other_library: Any, build: Any) -> None:
    other_library("libcuda-that-is-not-there.so.1")
    usable, reason = driver_status()
    assert not usable
    assert "libcuda-that-is-not-there.so.1" in reason
    with pytest.raises(DriverError, match="need an NVIDIA driver"):
        prepare_launch(torch.zeros(8, dtype=torch.uint8), ADD, GPU)


def test_a_driver_that_is_too_old_says_what_it_lacks(other_library: Any) -> None:
    other_library("libc.so.6")
    usable, reason = driver_status()
    assert not usable
    assert "cuLaunchKernelEx" in reason


def test_a_usable_driver_is_reported(cuda: Any) -> None:
    assert driver_status() == (True, driver._LIBRARY)
    assert number(cuda, "calls_init") == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a PyTorch without GPU")
def test_a_driver_without_a_pytorch_gpu_is_an_error(
    cuda: Any, add: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DriverError, match="sees no GPU"):
        prepare_launch(add, ADD, GPU)


# On a GPU
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_kernel_computes_on_the_device_and_under_capture(build: Any) -> None:
    major, minor = torch.cuda.get_device_capability()
    cubin = torch.frombuffer(bytearray(build("add", 10 * major + minor)), dtype=torch.uint8)
    x, y = torch.randn(500, device="cuda"), torch.randn(500, device="cuda")
    out = torch.zeros_like(x)
    run = prepare_launch(cubin, ADD, x.device)
    run([x, y, out])
    torch.testing.assert_close(out.double(), x.double() + 2.0 * y.double(), rtol=1e-6, atol=1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run([x, y, out])
    x.copy_(torch.randn(500, device="cuda"))
    graph.replay()
    torch.testing.assert_close(out.double(), x.double() + 2.0 * y.double(), rtol=1e-6, atol=1e-6)
    other = torch.zeros_like(x)
    thread = threading.Thread(target=run, args=([x, y, other],))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    torch.testing.assert_close(other, out)
