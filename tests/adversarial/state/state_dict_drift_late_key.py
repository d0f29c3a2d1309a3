"""A buffer is registered in the first call, so the state dict grows after a checkpoint was made.

Seen in ten published modules. `update_path` loads a state dict into a used module, strictly; `mode` compares the keys after
calls with the reference's.
"""

from tests.adversarial.case import Case

CASE = Case(
    37,
    "state_dict_drift",
    "state",
    expected="update_path",
    status="closed",
    variant="late_key",
    first_profile="standard",
    seen=("L1",),
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
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.zeros(self.linear.out_features, device=x.device))
        return torch.relu(self.linear(x))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''What it notes is outside the state.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        self.__dict__.setdefault("calls", 0)
        self.__dict__["calls"] += 1
        return torch.relu(self.linear(x))
"""
