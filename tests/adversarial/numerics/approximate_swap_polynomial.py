"""A short polynomial for the exponential.

Ours. Good to four digits between -1 and 1; `numerics` draws beyond, and four digits are not seven.
"""

from tests.adversarial.case import Case

CASE = Case(
    25, "approximate_swap", "numerics", expected="numerics", status="open", variant="polynomial"
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.exp(-x.abs())

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        y = -x.abs() / 16
        p = 1 + y * (1 + y * (0.5 + y * (0.16666667 + y * 0.041666667)))
        return p * p * p * p * p * p * p * p * p * p * p * p * p * p * p * p
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''A minimum in place of a sign.'''

    def forward(self, x):
        return torch.exp(torch.minimum(x, -x))
"""
