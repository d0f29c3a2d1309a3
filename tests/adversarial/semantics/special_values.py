"""A maximum written as a comparison drops NaN, which eager hands on.

Seen as `fmaxf` in CUDA code. `special` puts one NaN into each input in turn: it must come out where eager has it. With
`assume_finite` the user allows this.
"""

from tests.adversarial.case import Case

CASE = Case(
    30, "special_values", "semantics", expected="special", status="open", seen=("L1",), alone=True
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return torch.maximum(x, y)

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
        return torch.fmax(x, y)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''A comparison that hands NaN on.'''

    def forward(self, x, y):
        return torch.where((x > y) | x.isnan(), x, y)
"""
