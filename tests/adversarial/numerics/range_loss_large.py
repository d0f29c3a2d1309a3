"""Coarse where values are above a hundred, as a table that ends there.

A normal draw never gets there. `regimes` asks rows of one size, positive ones up to a thousand, and compares each with its own size.
"""

from tests.adversarial.case import Case

CASE = Case(
    22,
    "range_loss",
    "numerics",
    expected="regimes",
    status="open",
    variant="large",
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.log1p(torch.abs(x))

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
        y = torch.log1p(torch.abs(x))
        return torch.where(x > 100, 4.6151 + 0 * x, y)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Another formula above a hundred, and a right one.'''

    def forward(self, x):
        y = torch.log1p(torch.abs(x))
        return torch.where(x > 100, torch.log(1 + torch.abs(x)), y)
"""
