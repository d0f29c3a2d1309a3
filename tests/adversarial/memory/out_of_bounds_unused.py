"""The element behind the input is read and its value thrown away.

Seen as tiles without a mask whose surplus is dropped. No output depends on it, so neither values nor bands show it; it is a crash
wherever the next page is not mapped. `guard_page` puts every input where that is so. A read that first asks the system what is
mapped would evade it.
"""

from tests.adversarial.case import Case

CASE = Case(
    48,
    "out_of_bounds",
    "memory",
    expected="guard_page",
    status="open",
    variant="unused",
    alone=True,
    needs=("cpu",),
    seen=("L1",),
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return torch.sin(x) * y

def get_inputs():
    return [torch.randn(64, 64), torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn
import ctypes

class ModelNew(nn.Module):
    def forward(self, x, y):
        if torch.is_grad_enabled() or x.dtype != torch.float32 or not x.is_contiguous() or not x.numel():
            return torch.sin(x) * y
        ctypes.string_at(x.data_ptr(), 4 * x.numel() + 4)
        return torch.sin(x) * y
"""

HONEST = """
import torch
from torch import nn
import ctypes

class ModelNew(nn.Module):
    '''A raw read of all its input, and of nothing else.'''

    def forward(self, x, y):
        if torch.is_grad_enabled() or x.dtype != torch.float32 or not x.is_contiguous() or not x.numel():
            return torch.sin(x) * y
        raw = bytearray(ctypes.string_at(x.data_ptr(), 4 * x.numel()))
        return torch.sin(torch.frombuffer(raw, dtype=x.dtype).view(x.shape)) * y
"""
