"""A `squeeze` without a dimension: a batch of one loses its dimension.

Seen in published modules. `shapes` includes a batch of one.
"""

from tests.adversarial.case import Case

CASE = Case(45, "index_range", "shape", expected="shapes", status="open", seen=())

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x)).sum(1, keepdim=True)

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
        return torch.relu(self.linear(x)).sum(1).squeeze().unsqueeze(-1)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x)).sum(1).unsqueeze(-1)
"""
