"""What a Program costs at least: floating-point operations and bytes, step by step, from shapes alone.

A roofline estimate for planning and for limits; it runs nothing and knows nothing of caches or fusion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from torch_cudal1.program.check import used_values
from torch_cudal1.program.execute import prepare, skip_launch
from torch_cudal1.program.model import Program, TensorSpec, step_outs
from torch_cudal1.program.operator import value_specs

__all__ = ["Cost", "Roofline", "estimate"]


@dataclass(frozen=True)
class Cost:
    """Lower bounds of a Program: FLOPs of its products and convolutions, and bytes with and without fusion.

    `moved_bytes`: every step reads its operands and writes its results (eager). `least_bytes`: inputs once, outputs once.
    """

    flops: float
    moved_bytes: int
    least_bytes: int


@dataclass(frozen=True)
class Roofline:
    """A device's ceilings, for a rough estimate only: FLOP/s of the precision in use and bytes/s of its memory."""

    flops_per_s: float
    bytes_per_s: float

    def seconds(self, cost: Cost) -> float:
        """Time no implementation that materialises every step can beat."""
        return max(cost.flops / self.flops_per_s, cost.moved_bytes / self.bytes_per_s)


def estimate(program: Program) -> Cost:
    """The cost of `program`. Shapes come from fake tensors: nothing is allocated."""
    specs = value_specs(program)
    moved = sum(specs[index].size_bytes for index in _traffic(program) if index in specs)
    ends = [*program.inputs, *(specs[out] for out in program.outputs if out is not None)]
    return Cost(_flops(program), moved, sum(spec.size_bytes for spec in ends))


def _traffic(program: Program) -> Iterator[int]:
    for step in program.steps:
        yield from used_values(step)
        yield from step_outs(step)


def _flops(program: Program) -> float:
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), counter:
        prepare(program, torch.device(program.device), launcher=skip_launch)([_empty(spec) for spec in program.inputs])
    return float(counter.get_total_flops())


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.torch_dtype, device=spec.device)
