"""What each GPU is: one table by compute capability, and the GPU that tile rankings assume.

A new GPU is one row. Facts come from NVIDIA's CUDA C++ Programming Guide (technical specifications
per compute capability) and its architecture papers. The driver's facts of the GPU at hand (SM
count, clocks, L2 size) are read by `device.peaks`; the largest limits of all GPUs, which a Program
must keep to wherever it runs, are in `ir.check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "CHECK_RATES",
    "CPU_CLOCK_HZ",
    "CPU_FLOPS_PER_CLOCK",
    "FP32_FLOPS_PER_ELEMENT",
    "GPU_SPECS",
    "H200",
    "PRECISION_RATIO",
    "CheckRates",
    "GpuSpec",
    "TypicalGpu",
    "max_shared_bytes",
]


@dataclass(frozen=True)
class GpuSpec:
    """What all GPUs of one compute capability share.

    `block_shared_bytes`: shared memory of one block, after opting in. `half_flops_per_clock`: dense
    floating-point operations of one SM in half precision; None where no peak is known.
    """

    block_shared_bytes: int
    half_flops_per_clock: int | None = None


GPU_SPECS: Mapping[int, GpuSpec] = {  # by sm: 90 for sm_90 and sm_90a
    75: GpuSpec(65_536),
    80: GpuSpec(166_912, 2048),
    86: GpuSpec(101_376, 1024),
    87: GpuSpec(166_912, 2048),
    89: GpuSpec(101_376, 1024),
    90: GpuSpec(232_448, 4096),
    100: GpuSpec(232_448, 8192),
    103: GpuSpec(232_448, 8192),
    110: GpuSpec(232_448),
    120: GpuSpec(101_376, 2048),
}
# Of the half-precision peak, by bytes of the type: fp8, half, TF32, fp64.
PRECISION_RATIO: Mapping[int, float] = {1: 2.0, 2: 1.0, 4: 0.5, 8: 0.125}
# The least of sm_80 and later, so what a kernel may count on where the GPU is not in the table.
_MIN_BLOCK_SHARED_BYTES = 101_376

# Of a core with AMX tiles, or two AVX-512 units, by bytes of the type; no CPU has a higher clock.
CPU_FLOPS_PER_CLOCK: Mapping[int, float] = {1: 4096.0, 2: 2048.0, 4: 64.0, 8: 32.0}
CPU_CLOCK_HZ = 6e9


@dataclass(frozen=True)
class TypicalGpu:
    """The GPU for which bounds of tile configurations are computed. On other GPUs only the ratios
    of the bounds count, and the candidates are measured there.
    """

    sm: int
    sm_count: int
    clock_hz: float
    bytes_per_s: float
    launch_s: float


H200 = TypicalGpu(sm=90, sm_count=132, clock_hz=1.6e9, bytes_per_s=4.0e12, launch_s=3e-6)
# fp32 operations of an H200 while it moves one element: 67 TFLOP/s, 1.2e12 elements/s.
FP32_FLOPS_PER_ELEMENT = 50.0


@dataclass(frozen=True)
class CheckRates:
    """Rates that a reference and its comparison reach, host work included. Estimates of how long a
    check takes use them, because they must not depend on how busy the machine is.
    """

    flops_per_s: float
    bytes_per_s: float


CHECK_RATES: Mapping[str, CheckRates] = {
    "cuda": CheckRates(1e13, 1e9),
    "cpu": CheckRates(1e10, 2e8),
}


def max_shared_bytes(sm: int) -> int:
    """Bytes of shared memory that one block of a generated kernel may use on `sm_{sm}`."""
    spec = GPU_SPECS.get(sm)
    return max(_MIN_BLOCK_SHARED_BYTES, spec.block_shared_bytes if spec is not None else 0)
