"""Speed of light: a candidate faster than its device's ceilings did not do the work.

The bound is what the candidate itself must do at least: the products and convolutions of its own
ATen steps at the peak rate of the narrowest type in it, and the bytes of its results beyond what
the last-level cache can hold. What a kernel does inside is not counted, nor what is read (an
algebraic rewrite may need less of its inputs), so the bound is low and a pass proves little.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_cudal1.ir.cost import estimate
from torch_cudal1.ir.program import Aten, Program
from torch_cudal1.ir.records import Check
from torch_cudal1.ir.value_specs import output_specs, value_specs

__all__ = ["PEAK_SHARE", "Ceiling", "Work", "ceiling", "roofline", "work"]

PEAK_SHARE = 0.95  # nobody gets more of a peak than this
_FEWER_FLOPS = 4.0  # what Winograd's convolution may save over the nominal count
# Dense floating-point operations per clock and multiprocessor in half precision (vendor's
# architecture papers), by (major, minor).
_PER_CLOCK = {
    (8, 0): 2048,
    (8, 6): 1024,
    (8, 7): 2048,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 2048,
}
_RELATIVE = {1: 2.0, 2: 1.0, 4: 0.5, 8: 0.125}  # by bytes of the type: fp8, half, TF32, fp64
_CPU_PER_CLOCK = {
    1: 4096.0,
    2: 2048.0,
    4: 64.0,
    8: 32.0,
}  # a core with AMX tiles, or two AVX-512 units
_CPU_HZ = 6e9


@dataclass(frozen=True)
class Ceiling:
    """What a device cannot exceed: FLOP/s by bytes of the type, bytes/s of its memory, bytes that
    its last cache can hold.
    """

    flops_per_s: dict[int, float]
    bytes_per_s: float
    cache_bytes: float


@dataclass(frozen=True)
class Work:
    """What must be done at least: FLOPs of a type of so many bytes, and bytes of results."""

    flops: float
    type_bytes: int
    written_bytes: int


def work(program: Program) -> Work:
    """The least work of a Program."""
    convolves = any(
        isinstance(step, Aten) and "convolution" in step.target for step in program.steps
    )
    floating = [
        spec.torch_dtype.itemsize
        for spec in value_specs(program).values()
        if spec.torch_dtype.is_floating_point
    ]
    written = sum(spec.size_bytes for spec in output_specs(program) if spec is not None)
    return Work(
        estimate(program).flops / (_FEWER_FLOPS if convolves else 1),
        min(floating, default=4),
        written,
    )


def ceiling(device: torch.device) -> Ceiling | str:
    """The ceilings of a device; why they are not known."""
    if device.type == "cpu":
        rate = _CPU_HZ * torch.get_num_threads()
        return Ceiling(
            {size: rate * each for size, each in _CPU_PER_CLOCK.items()}, float("inf"), float("inf")
        )
    found = torch.cuda.get_device_properties(device)
    per_clock = _PER_CLOCK.get((found.major, found.minor))
    facts = [
        getattr(found, name, 0) for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    ]
    if per_clock is None or not all(facts):
        return f"no peak rates known for {found.name}"
    clock_hz, memory_hz, bus_bits = facts[0] * 1e3, facts[1] * 1e3, facts[2]
    flops = per_clock * found.multi_processor_count * clock_hz
    return Ceiling(
        {size: flops * share for size, share in _RELATIVE.items()},
        2 * memory_hz * bus_bits / 8,
        found.L2_cache_size,
    )


def roofline(least: Work, limits: Ceiling | str, time_us: float) -> Check:
    """`value`: share of the peak that `time_us` would mean; at most 0.95."""
    if isinstance(limits, str):
        return Check("roofline", True, detail=f"not tested: {limits}")
    products_s = least.flops / limits.flops_per_s[least.type_bytes]
    results_s = max(0.0, least.written_bytes - limits.cache_bytes) / limits.bytes_per_s
    bound_us = max(products_s, results_s) * 1e6
    share = bound_us / time_us
    detail = f"{time_us:.2f} us a call; the device needs at least {bound_us:.2f} us"
    return Check("roofline", share <= PEAK_SHARE, share, PEAK_SHARE, detail)
