"""An empty batch raises, where eager returns an empty result.

Ours. `shapes` includes size zero where eager accepts it.
"""

from tests.adversarial.case import Case

CASE = Case(
    45,
    "index_range",
    "shape",
    expected="shapes",
    status="open",
    variant="empty",
    first_profile="standard",
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
        top = x.abs().max()
        return torch.relu(self.linear(x)) if top is not None else x
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        top = x.abs().max() if x.numel() else x.new_zeros(())
        return torch.relu(self.linear(x)) if top is not None else x
"""
