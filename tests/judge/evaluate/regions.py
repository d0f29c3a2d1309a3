"""A region, and the same with less work."""

from __future__ import annotations

from tests.judge.programs import V, op, spec, with_steps
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Region

N = 384


def diagonal_product() -> tuple[Region, Program]:
    """diag(d) @ B: the region as written, and the same as a broadcast (less work by a factor of N)."""
    written = (op("aten.diag_embed.default", V(0), out=2), op("aten.mm.default", V(2), V(1), out=3))
    broadcast = (
        op("aten.unsqueeze.default", V(0), 1, out=2),
        op("aten.mul.Tensor", V(1), V(2), out=3),
    )
    region = Region(Program((spec(N), spec(N, N)), written, (3,)), ("input", "input"), name="diag")
    return region, with_steps(region, *broadcast, output=3)
