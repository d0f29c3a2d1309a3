"""What every kernel's text begins with: imports, the functions that it calls, and the types of its
arguments.
"""

from __future__ import annotations

import torch

from torch_cudal1.kernels.ops import bessel_formulas

__all__ = ["POINTERS", "add_prelude"]

_ENTRY = "\n@triton.jit\ndef SYMBOL("
_HEADER = '''"""Generated kernel; shapes and strides are literals."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def SYMBOL('''
# Tensor cores cut fp32 inputs off after TF32's 10 bits. Rounding first halves the error and takes
# its bias away. NaN is left alone: adding to its bits could make a number of it.
_NEAREST_TF32 = """
@triton.jit
def nearest_tf32(x):
    rounded = (x.to(tl.int32, bitcast=True) + 4096) & -8192
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)

"""
# Tensor dtype -> the type of a kernel's argument that points to it.
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}


def add_prelude(body: str, functions: str = "") -> str:
    """The complete text of a kernel: the head that every kernel has, the special functions that it
    calls, its own `functions`, and `body`, its text from the arguments on.
    """
    head, entry = _HEADER.split(_ENTRY)
    called = {"log_bessel_": bessel_formulas.FUNCTIONS, "nearest_tf32": _NEAREST_TF32}
    return (
        head
        + "".join(text for name, text in called.items() if name in body)
        + functions
        + _ENTRY
        + entry
        + body
    )
