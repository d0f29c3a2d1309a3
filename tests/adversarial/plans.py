"""Small regions and Programs for cases in program form, on the CPU or on a GPU. They judge nothing."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.ir.program import Alloc, Aten, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.ir.records import Candidate, Region

__all__ = ["PRODUCT", "V", "assemble", "candidate", "on_cuda", "op", "pointers", "product", "spec"]

V = Value
SM = 90

PRODUCT = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry product(.param .u64 x, .param .u64 y, .param .u64 out)
{
    .reg .b32 %r<8>;
    .reg .b64 %d<8>;
    .reg .f32 %f<4>;
    .reg .pred %p<2>;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r3, %r1, %r2, %r3;
    mul.wide.s32 %d1, %r3, 4;
    ld.param.u64 %d2, [x];
    ld.param.u64 %d3, [y];
    ld.param.u64 %d4, [out];
    add.s64 %d2, %d2, %d1;
    add.s64 %d3, %d3, %d1;
    add.s64 %d4, %d4, %d1;
    ld.global.f32 %f1, [%d2];
    ld.global.f32 %f2, [%d3];
    mul.f32 %f3, %f1, %f2;
    st.global.f32 [%d4], %f3;
    ret;
}
"""  # one element a thread, no mask: the grid must fit


def spec(*shape: int, device: str = "cpu") -> TensorSpec:
    """A contiguous float32 tensor."""
    return replace(TensorSpec.of(torch.empty(shape, device="meta")), device=device)


def op(target: str, *args: object, out: int, **kwargs: object) -> Aten:
    """One ATen step."""
    return Aten(target, args, tuple(sorted(kwargs.items())), (out,))


def product(device: str = "cpu") -> Region:
    """x * y, element by element: inputs are values 0 and 1, the result is value 2."""
    inputs = (spec(64, 64, device=device), spec(64, 64, device=device))
    return Region(
        Program(inputs, (op("aten.mul.Tensor", V(0), V(1), out=2),), (2,)),
        ("input", "input"),
        name="product",
    )


def candidate(program: Program) -> Candidate:
    """That Program as somebody's proposal."""
    return Candidate(program, "eager", "case", ("case",))


def pointers(*values: int) -> tuple[LaunchArg, ...]:
    """Values as pointer arguments."""
    return tuple(LaunchArg("ptr", V(value)) for value in values)


def on_cuda(
    region: Region, cubin: bytes, symbol: str, *, grid: int = 32, hidden: int = 0, **launch: Any
) -> Program:
    """The region's result by one launch with arguments x, y, out over 4096 elements. `hidden`: pointers that Triton appends."""
    arguments = (*pointers(0, 1, 2), *(LaunchArg("null") for _ in range(hidden)))
    plan = {"block": 128, "shared_bytes": 0, **launch}
    step = Launch(payload="kernel", symbol=symbol, grid=(grid, 1, 1), args=arguments, **plan)
    payload = torch.frombuffer(bytearray(cubin), dtype=torch.uint8)
    return Program(
        region.program.inputs,
        (Alloc(2, region.program.inputs[0]), step),
        (2,),
        payloads={"kernel": payload},
    )


def assemble(ptx: str) -> bytes:
    """PTX text through the assembler that comes with Triton; needs no GPU."""
    import triton

    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "case.ptx"), Path(folder, "case.cubin")
        source.write_text(ptx)
        subprocess.run(
            [str(assembler), f"-arch=sm_{SM}", str(source), "-o", str(result)],
            check=True,
            capture_output=True,
        )
        return result.read_bytes()
