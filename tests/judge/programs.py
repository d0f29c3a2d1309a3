"""Small Programs to judge: honest ones, and the same with one thing wrong."""

from __future__ import annotations

from dataclasses import replace

import torch

from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import Candidate, Contract, Region
from torch_cudal1.judge.reference.region_reference import RegionReference

V = Value
BATCH, WIDE, OUT = 32, 48, 64


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.of(torch.empty(shape, dtype=dtype))


def op(target: str, *args: object, out: int, **kwargs: object) -> Aten:
    return Aten(target, args, tuple(sorted(kwargs.items())), (out,))


def linear_relu(dtype: torch.dtype = torch.float32) -> Region:
    """relu(x @ w.T + b): inputs x, w, b; value 3 is w.T, 4 the sum, 5 the result."""
    steps = (
        op("aten.t.default", V(1), out=3),
        op("aten.addmm.default", V(2), V(0), V(3), out=4),
        op("aten.relu.default", V(4), out=5),
    )
    inputs = (spec(BATCH, WIDE, dtype=dtype), spec(OUT, WIDE, dtype=dtype), spec(OUT, dtype=dtype))
    return Region(
        Program(inputs, steps, (5,)), ("input", "parameter", "parameter"), name="linear_relu"
    )


def with_steps(region: Region, *steps: Aten, output: int) -> Program:
    return replace(region.program, steps=steps, outputs=(output,))


def candidate(program: Program, name: str = "attack", schedule: str = "eager") -> Candidate:
    return Candidate(program, schedule, "test", (name,))  # type: ignore[arg-type]


def subject(
    region: Region, contract: Contract | None = None, device: str = "cpu"
) -> RegionReference:
    return RegionReference(region, contract or Contract(), torch.device(device))
