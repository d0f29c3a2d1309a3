"""A rectifier as a product with a mask: minus infinity times zero is NaN, where eager has zero.

Ours. NaN is right and finite values are right; only an infinity shows it, and `special` puts one into each input.
"""

from tests.adversarial.case import Case

CASE = Case(
    30, "special_values", "semantics", expected="special", status="open", variant="infinity"
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x))

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return [64]
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        y = self.linear(x)
        return y * (y > 0)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        y = self.linear(x)
        return torch.where((y > 0) | y.isnan(), y, 0.0).to(y.dtype)
"""
