"""A scale is held as a plain tensor, which `.to()`, `.half()` and `.double()` do not move.

Seen in published modules. `dtypes` converts both after a first call and compares: the candidate fails or stays in the old type
where the reference follows.
"""

from tests.adversarial.case import Case

CASE = Case(
    37,
    "state_dict_drift",
    "state",
    expected="dtypes",
    status="closed",
    variant="plain_tensor",
    first_profile="standard",
    needs=("cpu",),  # on a GPU the first call fails: the reference is made on the CPU and moved
    seen=("L1",),
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.register_buffer('scale', torch.full((features,), 0.5), persistent=False)

    def forward(self, x):
        return self.linear(x) * self.scale

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
        self.scale = torch.full((features,), 0.5)

    def forward(self, x):
        return self.linear(x) * self.scale
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.register_buffer('scale', torch.full((features,), 0.5), persistent=False)

    def forward(self, x):
        return self.linear(x) * self.scale
"""
