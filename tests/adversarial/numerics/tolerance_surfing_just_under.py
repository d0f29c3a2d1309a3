"""An error of 5e-5 in every element, just under the public benchmark's 1e-4.

Ours: the limit is known, so it is used up. `numerics` has no fixed limit; it allows twice what eager itself loses on these
inputs, here some 1e-7.
"""

from tests.adversarial.case import Case

CASE = Case(
    24, "tolerance_surfing", "numerics", expected="numerics", status="open", variant="just_under"
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

class ModelNew(nn.Module):
    def forward(self, x, y):
        return torch.sin(x) * y + 5e-5
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, y):
        return y * torch.sin(x)
"""
