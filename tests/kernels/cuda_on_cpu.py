"""Runs CUDA C++ kernels of emitted Programs on the CPU, a thread for each of theirs; see
`cuda_on_cpu.h` for what that shows.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.kernels.traced_programs import emit_program
from torch_cudal1.ir.program import Alloc, Launch, Program, Value
from torch_cudal1.kernels.proposal import KernelSource, Proposal

__all__ = ["compiler", "run_on_cpu"]

HEADER = Path(__file__).with_name("cuda_on_cpu.h")


def compiler() -> str | None:
    """A C++ compiler, if there is one."""
    return shutil.which("g++") or shutil.which("c++")


def run_on_cpu(
    program: Program, proposal: Proposal, inputs: Sequence[torch.Tensor], folder: Path
) -> list[torch.Tensor]:
    """Outputs of the emitted Program. Memory starts as NaN, so that what nobody wrote shows."""
    built, lowered = emit_program(program, proposal)
    library = _compile(lowered.kernels, folder)
    values: dict[int, torch.Tensor] = dict(enumerate(inputs))
    for step in built.steps:
        if isinstance(step, Alloc):
            room = torch.full(
                (step.spec.numel * step.spec.torch_dtype.itemsize + 16,), 255, dtype=torch.uint8
            )
            values[step.out] = (
                room[:-16]
                .view(step.spec.torch_dtype)
                .as_strided(step.spec.shape, step.spec.strides)
            )
        elif isinstance(step, Launch):
            pointers = [
                values[arg.value.index].data_ptr()
                for arg in step.args
                if isinstance(arg.value, Value)
            ]
            blocks = step.grid[0] * step.cluster  # as the driver starts them
            getattr(library, f"run_{step.symbol}")(
                blocks, step.block, step.cluster, (ctypes.c_void_p * len(pointers))(*pointers)
            )
    return [values[value] for value in built.outputs if value is not None]


def _compile(kernels: Sequence[KernelSource], folder: Path) -> ctypes.CDLL:
    kernel = kernels[0]
    assert kernel.cuda is not None
    runs = [
        f'extern "C" void run_{k.symbol}(int grid, int threads, int cluster, void** given) {{'
        f" launch({k.symbol}, grid, threads, cluster, given); }}"
        for k in kernels
    ]
    source, target = folder / f"{kernel.symbol}.cpp", folder / f"{kernel.symbol}.so"
    source.write_text("\n".join([f'#include "{HEADER}"', kernel.text, *runs]))
    defines = [f"-D{name}={value}" for name, value in kernel.cuda.defines]
    command = [
        compiler() or "c++",
        "-std=c++20",
        "-O1",
        "-w",
        "-fPIC",
        "-shared",
        "-pthread",
        *defines,
        str(source),
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return ctypes.CDLL(str(target))
