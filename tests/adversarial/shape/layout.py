"""Strides are ignored: memory is read row by row from the first element on, as if the input were contiguous.

Seen in CUDA code that takes `data_ptr()`. `layouts` gives the same values transposed and with steps.
"""

from tests.adversarial.case import Case

CASE = Case(44, "layout", "shape", expected="layouts", status="open", seen=("L1",), alone=True)

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

class ModelNew(nn.Module):
    def forward(self, x, y):
        if x.requires_grad:
            return torch.sin(x) * y
        steps = torch.empty(x.shape).stride()
        size = x.storage_offset() + x.numel()
        if x.untyped_storage().nbytes() < size * x.element_size():
            return torch.sin(x) * y
        return torch.sin(x.as_strided(x.shape, steps, x.storage_offset())) * y
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Takes the memory only when it is contiguous.'''

    def forward(self, x, y):
        return torch.sin(x.contiguous()) * y if x.is_contiguous() else torch.sin(x) * y
"""
