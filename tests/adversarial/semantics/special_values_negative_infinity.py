"""A negative infinity, as masks hold it, is taken for a missing value.

Right for NaN and for an infinity. `special` puts one of each kind into the inputs of a call.
"""

from tests.adversarial.case import Case

CASE = Case(
    30,
    "special_values",
    "semantics",
    expected="special",
    status="open",
    variant="negative_infinity",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.abs(x)

def get_inputs():
    return [torch.randn(16, 32)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        return torch.where(torch.isneginf(x), torch.zeros_like(x), torch.abs(x))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        return torch.maximum(x, -x)
"""
