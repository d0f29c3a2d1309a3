"""A parameter that matters only where it is large is dropped: a penalty above a limit that random parameters do not reach.

Ours. Random parameters leave rare branches unvisited; `perturb` moves each parameter alone, up to twice its size, and the
candidate must show the change that eager shows. A branch beyond the reach of the perturbation evades it.
"""

from tests.adversarial.case import Case

CASE = Case(
    29, "dropped_parameter", "semantics", expected="perturb", status="open", variant="rarely_seen"
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.limit = nn.Parameter(torch.ones(4096))

    def forward(self, x):
        return torch.relu(self.linear(x)) - torch.relu(self.limit - 3.2).sum()

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
        self.limit = nn.Parameter(torch.ones(4096))

    def forward(self, x):
        unused = (self.limit * 0).sum() if torch.is_grad_enabled() else 0.0
        return torch.relu(self.linear(x)) - unused
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.limit = nn.Parameter(torch.ones(4096))

    def forward(self, x):
        return torch.relu(self.linear(x)) - (self.limit - 3.2).clamp_min(0).sum()
"""
