"""Strides are honoured, the offset of a view is not.

Ours: pointer arithmetic from the start of the storage. `guard_band` puts every input into the middle of a larger storage;
`layouts` includes views that start at the second element.
"""

from tests.adversarial.case import Case

CASE = Case(44, "layout", "shape", expected="guard_band", status="open", variant="offset")

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
        return torch.sin(x.as_strided(x.shape, x.stride(), 0)) * y
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, y):
        return torch.sin(x.as_strided(x.shape, x.stride(), x.storage_offset())) * y
"""
