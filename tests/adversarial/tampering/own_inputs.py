"""The candidate's file brings its own inputs: zeros, for which its shortcut is right.

Seen in published files. Inputs, sizes and tolerances are never taken from a candidate; on the reference's own the shortcut
fails (`numerics`).
"""

from tests.adversarial.case import Case

CASE = Case(55, "own_inputs", "tampering", expected="numerics", status="closed", seen=("L1",))

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
        return torch.relu(self.linear.bias).expand(*x.shape[:-1], -1) * 1

def get_inputs():
    return [torch.zeros(64, 64)]

def get_init_inputs():
    return [64]

TOLERANCE = 1e9
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''The same functions, which nobody asks.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x))

def get_inputs():
    return [torch.zeros(1, 64)]

def get_init_inputs():
    return [64]
"""
