"""Squared distances by the binomial formula: squares minus twice the product.

Ours, the usual trick for pairwise distances. On inputs with a common offset (`numerics`, shifted) the difference of large
numbers leaves few digits.
"""

from tests.adversarial.case import Case

CASE = Case(23, "cancellation", "numerics", expected="numerics", status="open", variant="distance")

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return (x - y).square().sum(1)

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
        return (x * x).sum(1) + (y * y).sum(1) - 2 * (x * y).sum(1)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Differences first.'''

    def forward(self, x, y):
        gap = y - x
        return (gap * gap).sum(1)
"""
