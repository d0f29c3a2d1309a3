"""The Triton kernel that benchmarks launch keeps NaN, as eager's relu does."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernels import relu


def test_relu_selects_by_comparison_so_that_nan_stays() -> None:
    types = {"x": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    compiled = triton.compile(
        ASTSource(relu, types, {"BLOCK": 64}), target=GPUTarget("cuda", 90, 32)
    )
    ptx = compiled.asm["ptx"]
    assert "max.f32" not in ptx  # drops a NaN: max(NaN, 0) is 0
    assert "setp.lt.f32" in ptx
