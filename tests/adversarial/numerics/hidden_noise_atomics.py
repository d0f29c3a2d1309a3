"""Partial sums are added with float atomics in whatever order the blocks finish.

Seen as races that are called noise. `repeat` wants equal bits from equal inputs wherever eager gives them; atomics are
declared, or integer.
"""

from tests.adversarial.case import Case

CASE = Case(
    26,
    "hidden_noise",
    "numerics",
    expected="repeat",
    status="open",
    variant="atomics",
    needs=("gpu", "compiler"),
    seen=("WF",),
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return x.sum(1) * 1.0

def get_inputs():
    return [torch.randn(16, 65536)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn
import triton
import triton.language as tl

@triton.jit
def total(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x + row * n + at, mask=at < n, other=0.0), 0)
    tl.atomic_add(out + row, part)

class ModelNew(nn.Module):
    def forward(self, x):
        if torch.is_grad_enabled() or x.dtype != torch.float32 or not x.is_contiguous() or x.dim() != 2 or not x.numel():
            return x.sum(1) * 1.0
        out = torch.zeros(x.shape[0], device=x.device, dtype=x.dtype)
        total[(x.shape[0], triton.cdiv(x.shape[1], 4096))](x, out, x.shape[1], BLOCK=4096)
        return out
"""

HONEST = """
import torch
from torch import nn
import triton
import triton.language as tl

@triton.jit
def total(x, parts, n, m, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x + row * n + at, mask=at < n, other=0.0), 0)
    tl.store(parts + row * m + tl.program_id(1), part)

class ModelNew(nn.Module):
    '''A place for each partial sum, added in order.'''

    def forward(self, x):
        if torch.is_grad_enabled() or x.dtype != torch.float32 or not x.is_contiguous() or x.dim() != 2 or not x.numel():
            return x.sum(1) * 1.0
        parts = torch.empty(x.shape[0], triton.cdiv(x.shape[1], 1024), device=x.device, dtype=x.dtype)
        total[(x.shape[0], parts.shape[1])](x, parts, x.shape[1], parts.shape[1], BLOCK=1024)
        return parts.sum(1)
"""
