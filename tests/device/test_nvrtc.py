"""CUDA C++ becomes machine code for any architecture without a GPU; what does not compile says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda import nvrtc
from torch_cudal1.device.cuda.cubin import inspect_cubin
from torch_cudal1.device.cuda.nvrtc import CompiledCuda, compile_cuda, nvrtc_status
from torch_cudal1.ir.program import Alloc, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.runtime.executor import prepare

SCALE = """
#include <cuda_fp16.h>
extern "C" __global__ void scale(const float* x, float* out, int n, float by) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < n) out[at] = x[at] * by + __half2float(__float2half(0.0f));
}
"""
needs_nvrtc = pytest.mark.skipif(not nvrtc_status()[0], reason=nvrtc_status()[1])


@pytest.fixture
def clear_library_cache() -> Iterator[None]:
    nvrtc._library.cache_clear()
    yield
    nvrtc._library.cache_clear()


@needs_nvrtc
@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_source_becomes_machine_code_of_the_architecture(sm):
    built = compile_cuda(SCALE, f"sm_{sm}")
    assert isinstance(built, CompiledCuda), built
    inspected = inspect_cubin(built.cubin)
    assert inspected.sm == sm
    assert "scale" in str(inspected)


@needs_nvrtc
@pytest.mark.parametrize(
    ("source", "arch", "options", "reason"),
    [
        ('extern "C" __global__ void f() { nonsense }', "sm_90", (), "nonsense"),
        ('#include "/etc/passwd"\n', "sm_90", (), "error"),
        ("#include <iostream>\n", "sm_90", (), "iostream"),
        (SCALE, "sm_12345", (), "invalid value for --gpu-architecture"),
        (SCALE, "compute_90", (), "must be a real one"),
        (SCALE, "sm_90", ("--no-such-option",), "no-such-option"),
        (SCALE, "sm_90", ("-I/etc",), "names files"),
        (SCALE, "sm_90", ("--pre-include=/etc/passwd",), "names files"),
    ],
)
def test_what_does_not_compile_says_why(source, arch, options, reason):
    answer = compile_cuda(source, arch, options=options)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason
    assert len(answer.reason) < 5_000


@needs_nvrtc
def test_options_change_the_code():
    source = 'extern "C" __global__ void f(int* x) { *x = N; }'
    assert isinstance(compile_cuda(source, "sm_90"), Refusal)
    assert isinstance(
        compile_cuda(source, "sm_90", options=("-DN=3", "--use_fast_math")), CompiledCuda
    )


def test_a_null_character_is_refused():
    with pytest.raises(ValueError, match="null character"):
        compile_cuda("a\0b", "sm_90")


@pytest.mark.usefixtures("clear_library_cache")
def test_without_the_library_the_answer_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nvrtc, "_iter_candidates", lambda: iter(["libnvrtc-that-is-not-there.so"]))
    assert not nvrtc_status()[0]
    answer = compile_cuda(SCALE, "sm_90")
    assert isinstance(answer, Refusal)
    assert "libnvrtc-that-is-not-there.so" in answer.reason
    assert "nvidia-cuda-nvrtc" in answer.reason


@pytest.mark.usefixtures("clear_library_cache")
def test_a_library_that_is_something_else_is_not_called(monkeypatch):
    monkeypatch.setattr(nvrtc, "_iter_candidates", lambda: iter(["libc.so.6"]))
    assert "lacks nvrtcCreateProgram" in nvrtc_status()[1]


def test_pytorch_s_own_cuda_major_comes_first(monkeypatch, tmp_path):
    for major in (12, 13):
        (tmp_path / f"libnvrtc.so.{major}").touch()
    (tmp_path / "libnvrtc.alt.so.13").touch()
    monkeypatch.setattr(nvrtc, "_iter_folders", lambda: iter([tmp_path]))
    for major, other in (("12", "13"), ("13", "12")):
        monkeypatch.setattr(nvrtc.torch, "version", SimpleNamespace(cuda=f"{major}.4"))
        assert [path.rsplit(".", 1)[-1] for path in nvrtc._iter_candidates()] == [
            major,
            other,
            major,
            other,
        ]


@needs_nvrtc
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_what_was_compiled_runs_on_the_device():
    major, minor = torch.cuda.get_device_capability()
    built = compile_cuda(SCALE, f"sm_{major}{minor}")
    assert isinstance(built, CompiledCuda), built
    spec = TensorSpec("float32", (500,), (1,), "cuda")
    args = (
        LaunchArg("ptr", Value(0)),
        LaunchArg("ptr", Value(1)),
        LaunchArg("i32", 500),
        LaunchArg("fp32", 3.0),
    )
    launch = Launch("k", "scale", (4, 1, 1), 128, 0, args)
    cubin = torch.frombuffer(bytearray(built.cubin), dtype=torch.uint8)
    run = prepare(
        Program((spec,), (Alloc(1, spec), launch), (1,), payloads={"k": cubin}),
        torch.device("cuda"),
    )
    x = torch.randn(500, device="cuda")
    torch.testing.assert_close(run([x])[0], 3 * x)
    wrong = dataclasses.replace(launch, args=args[:3])
    with pytest.raises(ValueError, match="parameter"):
        prepare(
            Program((spec,), (Alloc(1, spec), wrong), (1,), payloads={"k": cubin}),
            torch.device("cuda"),
        )
