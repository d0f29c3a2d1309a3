"""Triton kernels that benchmarks launch themselves. Importing this needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["relu"]


@triton.jit
def relu(x, out, n, BLOCK: tl.constexpr):
    """out[i] = max(x[i], 0) for i < n (a NaN stays one)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, inside)
    tl.store(out + at, tl.where(value < 0.0, 0.0, value), inside)
