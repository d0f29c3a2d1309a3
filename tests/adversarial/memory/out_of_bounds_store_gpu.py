"""The last element is stored twice: once in its place and once one place further.

Seen as off-by-one stores. `guard_band` surrounds every tensor, outputs too, with patterns that must be the same after the call.
"""

from tests.adversarial.case import Case

CASE = Case(
    48,
    "out_of_bounds",
    "memory",
    expected="guard_band",
    status="open",
    variant="store_gpu",
    needs=("gpu", "compiler"),
    seen=("L1", "DR"),
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return x * y

def get_inputs():
    return [torch.randn(64, 64), torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn
import triton
import triton.language as tl

@triton.jit
def product(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) * tl.load(y + at, mask=mask), mask=mask)
    last = tl.program_id(0) == tl.num_programs(0) - 1
    tl.store(out + n + tl.arange(0, 2), 0.0, mask=last)

class ModelNew(nn.Module):
    def forward(self, x, y):
        if torch.is_grad_enabled() or x.shape != y.shape or x.dtype != torch.float32 or not x.numel():
            return x * y
        if not (x.is_contiguous() and y.is_contiguous()):
            return x * y
        out = torch.empty_like(x)
        product[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
        return out
"""

HONEST = """
import torch
from torch import nn
import triton
import triton.language as tl

@triton.jit
def product(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) * tl.load(y + at, mask=mask), mask=mask)

class ModelNew(nn.Module):
    def forward(self, x, y):
        if torch.is_grad_enabled() or x.shape != y.shape or x.dtype != torch.float32 or not x.numel():
            return x * y
        if not (x.is_contiguous() and y.is_contiguous()):
            return x * y
        out = torch.empty_like(x)
        product[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
        return out
"""
