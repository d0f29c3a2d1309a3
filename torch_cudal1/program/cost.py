"""What a Program costs at least: floating-point operations and bytes, step by step, from shapes alone.

A roofline estimate for planning and for limits; it runs nothing and knows nothing of caches or fusion.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from torch_cudal1.program.aten import overload
from torch_cudal1.program.check import used_values
from torch_cudal1.program.execute import interpret, skip_launch
from torch_cudal1.program.model import Alloc, Aten, Call, Program, Step, TensorSpec, step_outs
from torch_cudal1.program.operator import value_specs

__all__ = ["ROOFLINES", "Cost", "Roofline", "estimate", "is_view", "launches_us"]

_LAUNCH_US = 5.0  # of the host for one step, at most


@dataclass(frozen=True)
class Cost:
    """Lower bounds of a Program: FLOPs of its products and convolutions, bytes with and without fusion, and steps that compute.

    `moved_bytes`: every step reads its operands and writes its results (eager). `least_bytes`: inputs once, outputs once. A view
    moves nothing and counts as no step.
    """

    flops: float
    moved_bytes: int
    least_bytes: int
    steps: int


@dataclass(frozen=True)
class Roofline:
    """A device's ceilings, for a rough estimate only: FLOP/s of fp32, bytes/s of its memory, seconds a step costs to start."""

    flops_per_s: float
    bytes_per_s: float
    step_s: float

    def seconds(self, cost: Cost) -> float:
        """Estimated time of running step by step."""
        return cost.flops / self.flops_per_s + cost.moved_bytes / self.bytes_per_s + cost.steps * self.step_s


# Orders of magnitude: only ratios of two estimates are ever used, and both sides of a ratio take the same line.
ROOFLINES = {"cpu": Roofline(1e11, 2e10, 2e-6), "cuda": Roofline(5e13, 4e12, 4e-6)}


def estimate(program: Program) -> Cost:
    """The cost of `program`. Shapes come from fake tensors: nothing is allocated."""
    specs = value_specs(program)
    working = [step for step in program.steps if not is_view(step)]
    moved = sum(specs[i].size_bytes for step in working for i in (*used_values(step), *step_outs(step)) if i in specs)
    ends = [*program.inputs, *(specs[out] for out in program.outputs if out is not None)]
    return Cost(_flops(program), moved, sum(spec.size_bytes for spec in ends), len(working))


def launches_us(program: Program) -> float:
    """Microseconds that a host takes at most to launch what `program` computes, one step after the other."""
    return _LAUNCH_US * _launched(program)


def _launched(program: Program) -> int:
    """Steps that are launched, those of nested Programs included."""
    plain = sum(not isinstance(step, (Alloc, Call)) and not is_view(step) for step in program.steps)
    return plain + sum(_launched(step.program) for step in program.steps if isinstance(step, Call))


def is_view(step: Step) -> bool:
    """Whether it moves nothing: an ATen operator whose result is its operand's memory."""
    return isinstance(step, Aten) and any(result.alias_info is not None for result in overload(step.target)._schema.returns)


def _flops(program: Program) -> float:
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), counter:
        interpret(program, torch.device(program.device), launcher=skip_launch)([_empty(spec) for spec in program.inputs])
    return float(counter.get_total_flops())


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.torch_dtype, device=spec.device)
