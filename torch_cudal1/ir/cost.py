"""What a Program costs at least: floating-point operations and bytes, step by step, from shapes
alone.

A roofline estimate for planning and for limits; it runs nothing and knows nothing of caches or
fusion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from torch_cudal1.ir.aliasing import is_view
from torch_cudal1.ir.check import used_values
from torch_cudal1.ir.interpreter import interpret, skip_launch
from torch_cudal1.ir.ops import attention_names
from torch_cudal1.ir.program import Alloc, Aten, Call, Program, TensorSpec, step_outs
from torch_cudal1.ir.value_specs import value_specs

__all__ = ["ROOFLINES", "Cost", "Roofline", "counting_flops", "estimate", "launches_us"]

_LAUNCH_US = 5.0  # of the host for one step, at most
_ENCODER_LAYER = "aten._transformer_encoder_layer_fwd.default"
_INSIDE = {
    _ENCODER_LAYER: 9
}  # operators that PyTorch runs for one, beyond the first; each reads and writes about what it yields
_FUSED_ATTENTION, _ITS_BACKWARD = (
    tuple(getattr(torch.ops.aten, name) for name in names)
    for names in (attention_names.FORWARDS, attention_names.BACKWARDS)
)


@dataclass(frozen=True)
class Cost:
    """Lower bounds of a Program: FLOPs of its products and convolutions, bytes with and without
    fusion, and steps that compute.

    `moved_bytes`: every step reads its operands and writes its results (eager). `least_bytes`:
    inputs once, outputs once. A view moves nothing and counts as no step.
    """

    flops: float
    moved_bytes: int
    least_bytes: int
    steps: int


@dataclass(frozen=True)
class Roofline:
    """A device's ceilings, for a rough estimate only: FLOP/s of fp32, bytes/s of its memory,
    seconds a step costs to start.
    """

    flops_per_s: float
    bytes_per_s: float
    step_s: float

    def seconds(self, cost: Cost) -> float:
        """Estimated time of running step by step."""
        return (
            cost.flops / self.flops_per_s
            + cost.moved_bytes / self.bytes_per_s
            + cost.steps * self.step_s
        )


# Orders of magnitude: only ratios of two estimates are ever used, and both sides of a ratio take
# the same line.
ROOFLINES = {"cpu": Roofline(1e11, 2e10, 2e-6), "cuda": Roofline(5e13, 4e12, 4e-6)}


def estimate(program: Program) -> Cost:
    """The cost of `program`. Shapes come from fake tensors: nothing is allocated."""
    specs = value_specs(program)
    working = [step for step in program.steps if not is_view(step)]
    moved = sum(
        specs[i].size_bytes
        for step in working
        for i in (*used_values(step), *step_outs(step))
        if i in specs
    )
    inside = [
        (_INSIDE[s.target], specs[s.outs[0]])
        for s in working
        if isinstance(s, Aten) and s.target in _INSIDE
    ]
    moved += sum(2 * count * made.size_bytes for count, made in inside)
    ends = [*program.inputs, *(specs[out] for out in program.outputs if out is not None)]
    return Cost(
        _flops(program),
        moved,
        sum(spec.size_bytes for spec in ends),
        len(working) + sum(count for count, _ in inside),
    )


def launches_us(program: Program) -> float:
    """Microseconds that a host takes at most to launch what `program` computes, one step after the
    other.
    """
    return _LAUNCH_US * _launched(program)


def _launched(program: Program) -> int:
    """Steps that are launched, those of nested Programs included."""
    plain = sum(not isinstance(step, (Alloc, Call)) and not is_view(step) for step in program.steps)
    return plain + sum(_launched(step.program) for step in program.steps if isinstance(step, Call))


def counting_flops() -> FlopCounterMode:
    """A counter of products, convolutions and attention.

    Of fewer heads of keys than of queries too, which that of torch 2.11 refuses.
    """
    backward = dict.fromkeys(_ITS_BACKWARD, _attention_backward_flops)
    layer = {torch.ops.aten._transformer_encoder_layer_fwd: _encoder_layer_flops}
    return FlopCounterMode(
        display=False,
        custom_mapping=dict.fromkeys(_FUSED_ATTENTION, _attention_flops) | backward | layer,
    )


def _attention_flops(
    query: Sequence[int], keys: Sequence[int], values: Sequence[int], *_: Any, **__: Any
) -> int:
    """Two products for every head of queries; what a causal mask saves is not taken off."""
    *heads, rows, depth = query
    return 2 * math.prod(heads) * rows * keys[-2] * (depth + values[-1])


def _encoder_layer_flops(
    x: Sequence[int], width: int, _heads: int, *weights: Any, **__: Any
) -> int:
    """Four products of the rows with weights, and two for every head of queries."""
    batch, rows, _ = x
    shapes = [
        one for one in weights if isinstance(one, (tuple, list, torch.Size)) and len(one) == 2
    ]
    return 2 * batch * rows * (sum(math.prod(one) for one in shapes) + 2 * rows * width)


def _attention_backward_flops(
    _grad: Sequence[int],
    query: Sequence[int],
    keys: Sequence[int],
    values: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """Five products: scores anew, gradients of weights and of values, and from both those of
    queries and keys.
    """
    *heads, rows, depth = query
    return 2 * math.prod(heads) * rows * keys[-2] * (3 * depth + 2 * values[-1])


def _flops(program: Program) -> float:
    counter = counting_flops()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), counter:
        interpret(program, torch.device(program.device), launcher=skip_launch)(
            [_empty(spec) for spec in program.inputs]
        )
    return float(counter.get_total_flops())


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.torch_dtype, device=spec.device)
