"""Test helper: decisions as made on GPUs of several types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.store.conftest import CONTRACT
from torch_cudal1.api.gpu_comparison import (
    move_program,
)
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import Candidate, Entry, Region, Target

H200, L4 = "NVIDIA H200", "NVIDIA L4"


def make_region(wide: int, device: str = "cuda") -> Region:
    spec = TensorSpec("float32", (wide, wide), (wide, 1), device)
    return Region(
        Program((spec,), (Aten("aten.mul.Tensor", (Value(0), 2.0), (), (1,)),), (1,)),
        ("input",),
        name=f"r{wide}",
    )


def make_decision(
    region_decided: Region,
    sku: str,
    us: float | None,
    *,
    baseline_us: float | None = None,
    **changes: Any,
) -> Entry:
    """A decision on `sku`: a baseline that takes `us`, or a kernel against one of `baseline_us`."""
    won = baseline_us is not None
    program = move_program(region_decided.program, "cuda")
    timing = (
        {"candidate_us": us, "baseline_us": baseline_us, "low": 1.1, "baseline": "eager"}
        if won
        else None
    )
    entry = Entry(
        region_key=program.digest,
        region_name=region_decided.name,
        target=Target("cuda", "sm_90" if sku == H200 else "sm_89", sku, "575", "2.13.0", "3.7"),
        contract=CONTRACT,
        choice=Candidate(
            program, "eager", "builtin" if won else "baseline", ("fold",) if won else ()
        ),
        evidence={
            "timing": timing,
            "baselines_us": {} if us is None else {"eager": baseline_us or us},
        },
        tried=(),
        created="2026-01-01T00:00:00+00:00",
        package="0.1.0",
    )
    return replace(entry, **changes)
