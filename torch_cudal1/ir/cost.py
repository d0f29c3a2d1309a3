"""The least cost of a Program: floating-point operations and bytes, step by step, from shapes
alone.

Plans and limits use it. It runs nothing and knows nothing of caches or fusion.
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
from torch_cudal1.ir.interpreter import interpret, skip_launch
from torch_cudal1.ir.ops import attention_names
from torch_cudal1.ir.program import Alloc, Aten, Call, Program, TensorSpec
from torch_cudal1.ir.value_specs import value_specs

__all__ = [
    "DEVICE_RATES",
    "Cost",
    "DeviceRates",
    "estimate_cost",
    "estimate_launch_us",
    "make_flop_counter",
]

# Host time of one step, at most.
_MAX_LAUNCH_US = 5.0
_ENCODER_LAYER = "aten._transformer_encoder_layer_fwd.default"
# Operators that PyTorch runs inside a composite one, beyond the first. Each reads and writes about
# as many bytes as the result has.
_EXTRA_OPERATORS = {_ENCODER_LAYER: 9}
_FUSED_ATTENTION, _FUSED_ATTENTION_BACKWARD = (
    tuple(getattr(torch.ops.aten, name) for name in names)
    for names in (attention_names.FORWARDS, attention_names.BACKWARDS)
)


@dataclass(frozen=True)
class Cost:
    """Lower bounds of a Program: FLOPs of its products and convolutions, bytes with and without
    fusion, and steps that compute.

    `moved_bytes`: every step reads its operands and writes its results (eager). `min_bytes`:
    inputs once, outputs once. A view moves nothing and counts as no step.
    """

    flops: float
    moved_bytes: int
    min_bytes: int
    steps: int


@dataclass(frozen=True)
class DeviceRates:
    """Rates that a device reaches step by step, roughly: FLOP/s of fp32, bytes/s of its memory, and
    the seconds that a step costs to start. They are no bound: that is
    `device.peaks.find_lower_bound_us`.
    """

    flops_per_s: float
    bytes_per_s: float
    step_s: float

    def estimate_s(self, cost: Cost) -> float:
        """The estimated seconds that a Program takes step by step."""
        return (
            cost.flops / self.flops_per_s
            + cost.moved_bytes / self.bytes_per_s
            + cost.steps * self.step_s
        )


# Orders of magnitude: only ratios of two estimates are ever used, and both sides of a ratio take
# the same line.
DEVICE_RATES = {"cpu": DeviceRates(1e11, 2e10, 2e-6), "cuda": DeviceRates(5e13, 4e12, 4e-6)}


def estimate_cost(program: Program) -> Cost:
    """The cost of `program`. Shapes come from fake tensors: nothing is allocated."""
    specs = value_specs(program)
    # A view only computes an address.
    working = [step for step in program.steps if not is_view(step)]
    # Numbers that an operator yields beside its tensors have no spec and are no memory.
    moved = sum(
        specs[i].size_bytes for step in working for i in (*step.reads, *step.writes) if i in specs
    )
    fused_results = [
        (_EXTRA_OPERATORS[s.target], specs[s.outs[0]])
        for s in working
        if isinstance(s, Aten) and s.target in _EXTRA_OPERATORS
    ]
    moved += sum(2 * count * result_spec.size_bytes for count, result_spec in fused_results)
    ends = [*program.inputs, *(specs[out] for out in program.outputs if out is not None)]
    return Cost(
        _count_flops(program),
        moved,
        sum(spec.size_bytes for spec in ends),
        len(working) + sum(count for count, _ in fused_results),
    )


def estimate_launch_us(program: Program) -> float:
    """Microseconds that a host takes at most to launch what `program` computes, one step after the
    other.
    """
    return _MAX_LAUNCH_US * _count_launches(program)


def _count_launches(program: Program) -> int:
    """Steps that are launched, those of nested Programs included."""
    plain = sum(not isinstance(step, (Alloc, Call)) and not is_view(step) for step in program.steps)
    return plain + sum(
        _count_launches(step.program) for step in program.steps if isinstance(step, Call)
    )


def make_flop_counter() -> FlopCounterMode:
    """A counter of the FLOPs of products, convolutions and attention, also where keys have fewer
    heads than queries.
    """
    backward = dict.fromkeys(_FUSED_ATTENTION_BACKWARD, _count_attention_backward_flops)
    layer = {torch.ops.aten._transformer_encoder_layer_fwd: _count_encoder_layer_flops}
    return FlopCounterMode(
        display=False,
        # torch 2.11's own formula refuses fewer heads of keys than of queries.
        custom_mapping=dict.fromkeys(_FUSED_ATTENTION, _count_attention_flops) | backward | layer,
    )


def _count_attention_flops(
    query: Sequence[int], keys: Sequence[int], values: Sequence[int], *_: Any, **__: Any
) -> int:
    """Two products for every head of queries. The part that a causal mask saves is counted too."""
    *heads, rows, depth = query
    # Over the heads of queries: with fewer heads of keys each of them is used several times.
    return 2 * math.prod(heads) * rows * keys[-2] * (depth + values[-1])


def _count_encoder_layer_flops(
    x: Sequence[int], width: int, _heads: int, *weights: Any, **__: Any
) -> int:
    """Four products of the rows with weights, and two for every head of queries."""
    batch, rows, _ = x
    weight_shapes = [
        weight_shape
        for weight_shape in weights
        if isinstance(weight_shape, (tuple, list, torch.Size)) and len(weight_shape) == 2
    ]
    return (
        2
        * batch
        * rows
        * (sum(math.prod(weight_shape) for weight_shape in weight_shapes) + 2 * rows * width)
    )


def _count_attention_backward_flops(
    _grad: Sequence[int],
    query: Sequence[int],
    keys: Sequence[int],
    values: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """Five products: the scores again, the gradients of the weights and of the values, and from
    both the gradients of queries and keys.
    """
    *heads, rows, depth = query
    return 2 * math.prod(heads) * rows * keys[-2] * (3 * depth + 2 * values[-1])


def _count_flops(program: Program) -> float:
    counter = make_flop_counter()
    # Constants are real tensors. Kernels are skipped: machine code does not say how much it
    # computes.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), counter:
        interpret(program, torch.device(program.device), launcher=skip_launch)(
            [_make_empty(spec) for spec in program.inputs]
        )
    return float(counter.get_total_flops())


def _make_empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.torch_dtype, device=spec.device)
