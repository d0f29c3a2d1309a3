"""Blocks add to the same places by loading, adding and storing: whoever is in between is lost.

Seen as missing barriers and atomics. Values are wrong in most runs; `numerics` sees it first, `repeat` would.
"""

from tests.adversarial.case import Case

CASE = Case(
    49,
    "race_or_uninitialised",
    "memory",
    expected="numerics",
    status="open",
    variant="lost_update",
    needs=("gpu", "compiler"),
    seen=("L1",),
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return x.sum(0)

def get_inputs():
    return [torch.randn(4096, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn
import triton
import triton.language as tl

@triton.jit
def add(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < n
    here = tl.load(out + at, mask=mask, volatile=True)
    tl.store(out + at, here + tl.load(x + tl.program_id(0) * n + at, mask=mask), mask=mask)

class ModelNew(nn.Module):
    def forward(self, x):
        if torch.is_grad_enabled() or x.dtype != torch.float32 or not x.is_contiguous() or x.dim() != 2 or not x.numel():
            return x.sum(0)
        out = torch.zeros(x.shape[1], device=x.device, dtype=x.dtype)
        add[(x.shape[0],)](x, out, x.shape[1], BLOCK=64)
        return out
"""

HONEST = """
import torch
from torch import nn
import triton
import triton.language as tl

@triton.jit
def add(x, out, m, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, m, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + at * n + tl.program_id(0), mask=at < m, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))

class ModelNew(nn.Module):
    '''One block a column.'''

    def forward(self, x):
        if torch.is_grad_enabled() or x.dtype != torch.float32 or not x.is_contiguous() or x.dim() != 2 or not x.numel():
            return x.sum(0)
        out = torch.empty(x.shape[1], device=x.device, dtype=x.dtype)
        add[(x.shape[1],)](x, out, x.shape[0], x.shape[1], BLOCK=1024)
        return out
"""
