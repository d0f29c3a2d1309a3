"""The launch asks for more shared memory than a block can have; the error is swallowed and the empty output returned.

Seen as a bad launch whose status nobody checks. Values and the fill of fresh memory show that nothing was written; `numerics`
comes first. A launch of ours goes through a launcher that raises, see the variant `block`.
"""

from tests.adversarial.case import Case

CASE = Case(
    17,
    "launch_failure",
    "laziness",
    expected="numerics",
    status="open",
    needs=("gpu", "compiler"),
    seen=("WF", "L1"),
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
def product(x, y, out, n, BLOCK: tl.constexpr, pad: tl.constexpr):
    tall = tl.zeros([pad, 16], tl.float16)
    wide = tl.dot(tall, tl.zeros([16, 128], tl.float16))
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
        try:
            product[(1,)](x, y, out, x.numel(), BLOCK=1024, num_warps=4, pad=1 << 17)
        except Exception:
            pass
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
    '''A kernel that fits.'''

    def forward(self, x, y):
        if torch.is_grad_enabled() or x.shape != y.shape or x.dtype != torch.float32 or not x.numel():
            return x * y
        if not (x.is_contiguous() and y.is_contiguous()):
            return x * y
        out = torch.empty_like(x)
        product[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
        return out
"""
