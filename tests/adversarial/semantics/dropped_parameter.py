"""The bias is gone.

Seen in the published set. `numerics` draws biases around a half, so they show. A bias that cannot show, such as one before a
normalisation, is recorded as unobservable; see the twin.
"""

from tests.adversarial.case import Case

CASE = Case(29, "dropped_parameter", "semantics", expected="numerics", status="open", seen=("L1",))

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
        return torch.relu(x @ self.linear.weight.t())
"""

TWIN_REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.norm = nn.LayerNorm(features)

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)))

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return [64]
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''A bias before a normalisation does show unless the normalisation removes it, as a mean over all features does.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.norm = nn.LayerNorm(features)

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)))
"""
