"""Roofline check: a candidate that is faster than its device's peaks allow did not do the work.

The lower bound is what the candidate itself must do: the products and convolutions of its own ATen
steps, and the bytes of its results. Work inside a kernel does not count, nor do reads, so the bound
is low and a pass proves little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.specs import CPU_CLOCK_HZ, CPU_FLOPS_PER_CLOCK, GPU_SPECS, PRECISION_RATIO
from torch_cudal1.ir.cost import estimate_cost
from torch_cudal1.ir.program import Aten, Program
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.ir.value_specs import output_specs, value_specs

__all__ = [
    "MAX_PEAK_FRACTION",
    "DevicePeaks",
    "RequiredWork",
    "check_roofline",
    "count_required_work",
    "find_device_peaks",
    "find_lower_bound_us",
]

# No kernel gets more of a peak than this.
MAX_PEAK_FRACTION = 0.95
# Winograd's F(4x4, 3x3) needs a quarter of the nominal multiplications (Lavin and Gray, 2015).
_WINOGRAD_SAVING = 4.0


@dataclass(frozen=True)
class DevicePeaks:
    """Rates that a device cannot exceed: FLOP/s by bytes of the type, and bytes/s of its memory.
    `cache_bytes`: what its last-level cache holds.
    """

    flops_per_s: dict[int, float]
    bytes_per_s: float
    cache_bytes: float


@dataclass(frozen=True)
class RequiredWork:
    """The least work of a Program: FLOPs in a type of `type_bytes` bytes, and bytes of its results."""

    flops: float
    type_bytes: int
    written_bytes: int


def count_required_work(program: Program) -> RequiredWork:
    """The least work of a Program."""
    convolves = any(
        isinstance(step, Aten) and "convolution" in step.target for step in program.steps
    )
    floating = [
        spec.torch_dtype.itemsize
        for spec in value_specs(program).values()
        if spec.torch_dtype.is_floating_point
    ]
    # Results only: an algebraic rewrite may need less of its inputs than they hold.
    written = sum(spec.size_bytes for spec in output_specs(program) if spec is not None)
    return RequiredWork(
        estimate_cost(program).flops / (_WINOGRAD_SAVING if convolves else 1),
        # The narrowest type in the Program: its products may run at that type's rate.
        min(floating, default=4),
        written,
    )


def find_device_peaks(device: torch.device) -> DevicePeaks | Refusal:
    """The peaks of a device, or why they are not known."""
    if device.type == "cpu":
        rate = CPU_CLOCK_HZ * torch.get_num_threads()
        flops_per_s = {size: rate * flops for size, flops in CPU_FLOPS_PER_CLOCK.items()}
        # PyTorch does not know a CPU's bandwidth or cache, so only the products bound it.
        return DevicePeaks(flops_per_s, math.inf, math.inf)
    properties = torch.cuda.get_device_properties(device)
    spec = GPU_SPECS.get(10 * properties.major + properties.minor)
    # Older releases of PyTorch lack these three.
    rates = [
        getattr(properties, name, 0)
        for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    ]
    if spec is None or spec.half_flops_per_clock is None or not all(rates):
        return Refusal(f"no peak rates known for {properties.name}")
    # PyTorch gives kHz.
    clock_hz, memory_hz, bus_bits = rates[0] * 1e3, rates[1] * 1e3, rates[2]
    half_flops_per_s = spec.half_flops_per_clock * properties.multi_processor_count * clock_hz
    return DevicePeaks(
        {size: half_flops_per_s * ratio for size, ratio in PRECISION_RATIO.items()},
        # Two transfers a clock (DDR), eight bits a byte.
        2 * memory_hz * bus_bits / 8,
        properties.L2_cache_size,
    )


def find_lower_bound_us(work: RequiredWork, peaks: DevicePeaks) -> float:
    """Microseconds below which no device with these peaks does that work."""
    products_s = work.flops / peaks.flops_per_s[work.type_bytes]
    # What fits into the last cache need not reach memory before the clock stops.
    results_s = max(0.0, work.written_bytes - peaks.cache_bytes) / peaks.bytes_per_s
    return max(products_s, results_s) * 1e6


def check_roofline(work: RequiredWork, peaks: DevicePeaks | Refusal, time_us: float) -> CheckResult:
    """The check "roofline". Its `value` is the share of the peaks that `time_us` would mean; at
    most MAX_PEAK_FRACTION passes.
    """
    if isinstance(peaks, Refusal):
        # Passed with the reason: an unknown GPU must not refuse every candidate.
        return CheckResult("roofline", True, detail=f"not tested: {peaks}")
    lower_bound_us = find_lower_bound_us(work, peaks)
    share = lower_bound_us / time_us
    detail = f"{time_us:.2f} us a call; the device needs at least {lower_bound_us:.2f} us"
    return CheckResult("roofline", share <= MAX_PEAK_FRACTION, share, MAX_PEAK_FRACTION, detail)
