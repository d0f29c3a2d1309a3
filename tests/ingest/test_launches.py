"""User-defined Triton kernels become launches of machine code. What they compute is the judge's
question: nothing is run here.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.device.cuda.cubin import check_launch, inspect_cubin
from torch_cudal1.graph.lower import lower
from torch_cudal1.ingest.published import launches, tidy
from torch_cudal1.ingest.published.trace_source import run_once
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.program import Alloc, Aten, Call, Launch, Program, Value

triton = pytest.importorskip("triton")

SM = 90
SOURCE = """
import torch, triton
import triton.language as tl

@triton.jit
def scale_add(x, y, out, n, factor, BLOCK: tl.constexpr, RELU: tl.constexpr = True):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(x + at, at < n) * factor + tl.load(y + at, at < n)
    if RELU:
        found = tl.maximum(found, 0.0)
    tl.store(out + at, found, at < n)

one_way = triton.autotune([triton.Config({"BLOCK": 128}, num_warps=8)], key=["n"])(scale_add)
two_ways = triton.autotune([triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])(scale_add)
decided = triton.heuristics({"BLOCK": lambda given: 64 if given["n"] < 100 else 512})(scale_add)

class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        n = x.numel()
        BODY
        return out
"""
LAUNCH = "out = torch.empty_like(x); KERNEL[lambda meta: (triton.cdiv(n, meta['BLOCK']),)](x, y, out, n, 1.5, BLOCK=128)"


def module(body: str, folder: Path) -> ModuleType:
    path = folder / "source.py"
    path.write_text(SOURCE.replace("BODY", body))
    spec = importlib.util.spec_from_file_location("published_source", path)
    assert spec is not None
    assert spec.loader is not None
    source_module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source_module)
    return source_module


def program_of(body: str, folder: Path, sm: int | None = SM) -> Program:
    """As `trace_candidate` does it, with tensors on the CPU in place of those on a GPU."""
    with torch.no_grad(), launches.trace_launches(sm):
        traced = run_once(
            module(body, folder).ModelNew(), (torch.randn(10, 100), torch.randn(10, 100)), {}
        )
        (graph,) = traced.graphs
        tidy.drop_copies(graph.module)
        return lower(graph.module, kernels=True).region.program


def launch_of(program: Program) -> tuple[Program, Launch]:
    (call,) = (step for step in program.steps if isinstance(step, Call))
    (launch,) = (step for step in call.program.steps if isinstance(step, Launch))
    return call.program, launch


@pytest.mark.parametrize(
    ("kernel", "arguments", "grid", "block"),
    [
        ("scale_add", "BLOCK=128", 8, 128),
        ("scale_add", "BLOCK=256, num_warps=2", 4, 64),
        ("one_way", "", 8, 256),
        ("decided", "", 2, 128),
    ],
)
def test_a_kernel_becomes_a_launch_of_checked_machine_code(
    kernel: str, arguments: str, grid: int, block: int, tmp_path: Path
) -> None:
    program = program_of(
        LAUNCH.replace("KERNEL", kernel).replace("BLOCK=128)", f"{arguments})"), tmp_path
    )
    check_program(program)
    assert [type(step) for step in program.steps] == [
        Call
    ]  # the copy into `out` and its empty memory are gone
    inner, launch = launch_of(program)
    assert (launch.grid, launch.block) == ((grid, 1, 1), block)
    assert [arg.kind for arg in launch.args] == ["ptr", "ptr", "ptr", "i32", "fp32", "null", "null"]
    assert [arg.value for arg in launch.args][:5] == [Value(0), Value(1), Value(2), 1000, 1.5]
    assert [step.spec.shape for step in inner.steps if isinstance(step, Alloc)] == [(10, 100)]
    kernel_found = check_launch(
        inspect_cubin(bytes(inner.payloads[launch.payload].tolist())), launch, SM
    )
    assert kernel_found.symbol == "scale_add"


def test_what_one_kernel_wrote_the_next_one_reads_and_aten_goes_on(tmp_path: Path) -> None:
    first = LAUNCH.replace("KERNEL", "scale_add")
    second = "last = torch.empty_like(x); scale_add[(8,)](out, out, last, n, 1.0, BLOCK=128); out = last.sum(0)"
    program = program_of(f"{first}; {second}", tmp_path)
    check_program(program)
    assert [type(step) for step in program.steps] == [Call, Call, Aten]
    first_call, second_call, _ = program.steps
    assert isinstance(first_call, Call)
    assert isinstance(second_call, Call)
    assert second_call.args == first_call.outs  # the same tensor twice is one input


REFUSED = {
    "two_ways": (
        LAUNCH.replace("KERNEL", "two_ways").replace(", BLOCK=128", ""),
        "tunes itself among 2 configurations",
    ),
    "an input": (
        "out = x; scale_add[(8,)](x, y, x, n, 1.0, BLOCK=128)",
        "writes to no fresh memory",
    ),
    "zeros": (
        "out = torch.zeros_like(x); scale_add[(8,)](x, y, out, n, 1.0, BLOCK=128)",
        "writes to no fresh memory",
    ),
    "twice the same": (
        "out = torch.empty_like(x); scale_add[(8,)](x, out, out, n, 1.0, BLOCK=128)",
        "the memory that it writes twice",
    ),
    "a grid of tensors": (
        "out = torch.empty_like(x); scale_add[(n, 'a')](x, y, out, n, 1.0, BLOCK=128)",
        "a grid of",
    ),
    "an unknown option": (
        "out = torch.empty_like(x); scale_add[(8,)](x, y, out, n, 1.0, BLOCK=128, launch_pdl=True)",
        "launch_pdl",
    ),
    "a missing argument": (
        "out = torch.empty_like(x); scale_add[(8,)](x, y, out, n, BLOCK=128)",
        "without 'factor'",
    ),
    "no code": (
        "out = torch.empty_like(x); scale_add[(8,)](x, y, out, n, 1.0, BLOCK=100)",
        "Triton does not compile",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_launch_says_why(name: str, tmp_path: Path) -> None:
    body, word = REFUSED[name]
    with pytest.raises(NotLowerableError) as caught:
        program_of(body, tmp_path)
    assert word in caught.value.reason, caught.value.reason


def test_without_a_gpu_there_is_nothing_to_compile_for(tmp_path: Path) -> None:
    assert launches.find_sm(torch.device("cpu")) is None
    with pytest.raises(NotLowerableError, match="needs an NVIDIA GPU"):
        program_of(LAUNCH.replace("KERNEL", "scale_add"), tmp_path, None)


def test_a_region_may_not_hold_a_kernel(tmp_path: Path) -> None:
    with torch.no_grad(), launches.trace_launches(SM):
        traced = run_once(
            module(LAUNCH.replace("KERNEL", "scale_add"), tmp_path).ModelNew(),
            (torch.randn(4), torch.randn(4)),
            {},
        )
    with pytest.raises(NotLowerableError, match="belongs to another library"):
        lower(traced.graphs[0].module)


def test_tracing_leaves_tritons_own_launch_as_it_was() -> None:
    from triton.runtime.jit import KernelInterface

    before = KernelInterface.__getitem__
    with launches.trace_launches(SM):
        assert KernelInterface.__getitem__ is not before
    assert KernelInterface.__getitem__ is before
