"""A lower bound on a region's time on a device; near it the search stops.

Computed from shapes: the FLOPs of its products at the peak of the tensor cores, and the bytes of
its results and of the inputs that some step reads whole. The judge rejects a candidate that is
faster, since it cannot have done the work.
"""

from __future__ import annotations

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.peaks import MAX_PEAK_FRACTION, count_required_work, find_device_peaks
from torch_cudal1.ir.aliasing import is_view
from torch_cudal1.ir.aten import overload
from torch_cudal1.ir.program import Aten, Program, Step
from torch_cudal1.kernels import registry

__all__ = ["lower_bound_us"]

_FULL_READERS = registry.list_full_readers()
# The bound takes the fastest rate a dtype can have: fp32 may run as TF32.
_TF32_BYTES = 4


def lower_bound_us(program: Program, device: torch.device) -> float:
    """Microseconds that `program` takes at least on `device`. 0.0 where no bound is known: on a
    CPU, on a GPU without known peaks, or for operators that cannot be estimated.
    """
    limits = find_device_peaks(device) if device.type == "cuda" else Refusal("no GPU")
    # 0.0 disables every rule that compares with the bound.
    if isinstance(limits, Refusal):
        return 0.0
    try:
        least = count_required_work(program)
    except (
        Cudal1Error,
        AssertionError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        # Raised for an operator that fake tensors cannot run.
        telemetry.record(
            "search",
            "no_floor",
            reason=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
        )
        return 0.0
    # A step that indexes or slices may need only a part of its input.
    read = {index for step in program.steps if _reads_every_element(step) for index in step.reads}
    # Only inputs and results: a perfect kernel keeps all else on the chip.
    moved = least.written_bytes + sum(
        spec.size_bytes for at, spec in enumerate(program.inputs) if at in read
    )
    # float64 is counted at the rate of four bytes, which is too fast: the bound stays a bound.
    rate = limits.flops_per_s[min(_TF32_BYTES, least.type_bytes)]
    calculated_s, passed_s = (
        least.flops / rate,
        # What fits the cache may be there already from the call before.
        max(0.0, moved - limits.cache_bytes) / limits.bytes_per_s,
    )
    # The larger of both, since arithmetic and memory overlap.
    return 1e6 * max(calculated_s, passed_s) / MAX_PEAK_FRACTION


def _reads_every_element(step: Step) -> bool:
    """Whether it needs every element of its operands."""
    if not isinstance(step, Aten) or is_view(step):
        return False
    return step.target in _FULL_READERS or torch.Tag.pointwise in overload(step.target).tags
