"""How fast a region can be at all on a device: below that no candidate is looked for.

A bound from shapes: what its products must calculate at the peak of the tensor cores, and what must
pass the memory: results, and inputs that some step reads whole. The judge refuses whoever is faster
than that as not having done the work.
"""

from __future__ import annotations

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.device.peaks import PEAK_SHARE, ceiling, work
from torch_cudal1.graph.fusion.fusible_ops import POOLS, ROW_OPS
from torch_cudal1.ir.aliasing import is_view
from torch_cudal1.ir.aten import overload
from torch_cudal1.ir.check import used_values
from torch_cudal1.ir.program import Aten, Program, Step

__all__ = ["floor_us"]

_MATMULS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm"))
_PARTLY = POOLS | {"aten.nll_loss_forward.default"}
_TF32_BYTES = 4


def floor_us(program: Program, device: torch.device) -> float:
    """Microseconds below which `program` cannot run, 0.0 where that is not known: no GPU, none
    whose peaks are, no estimate.
    """
    limits = ceiling(device) if device.type == "cuda" else "no GPU"
    if isinstance(limits, str):
        return 0.0
    try:
        least = work(program)
    except (
        Cudal1Error,
        AssertionError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # of an operator that fake tensors cannot run
        telemetry.record(
            "search",
            "no_floor",
            reason=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
        )
        return 0.0
    read = {index for step in program.steps if _reads_all(step) for index in used_values(step)}
    moved = least.written_bytes + sum(
        spec.size_bytes for at, spec in enumerate(program.inputs) if at in read
    )
    rate = limits.flops_per_s[min(_TF32_BYTES, least.type_bytes)]
    calculated_s, passed_s = (
        least.flops / rate,
        max(0.0, moved - limits.cache_bytes) / limits.bytes_per_s,
    )
    return 1e6 * max(calculated_s, passed_s) / PEAK_SHARE


def _reads_all(step: Step) -> bool:
    """Whether it needs every element of its operands."""
    if not isinstance(step, Aten) or is_view(step):
        return False
    if step.target in _MATMULS or (step.target in ROW_OPS and step.target not in _PARTLY):
        return True
    return torch.Tag.pointwise in overload(step.target).tags
