"""Running statistics follow the first step of an instance, and stay there for the rest of the training.

A check of one step, or of two instances with a step each, sees nothing. `mode` trains one instance for four steps and compares its
state.
"""

from tests.adversarial.case import Case

CASE = Case(
    31,
    "train_eval",
    "semantics",
    expected="mode",
    status="closed",
    variant="one_step",
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)))

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
        self.norm = nn.BatchNorm1d(features)
        self.steps = 0

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.norm.momentum = 0.1 if self.steps == 1 else 0.0
        return torch.relu(self.norm(self.linear(x)))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Counts its steps.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.norm = nn.BatchNorm1d(features)
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        return torch.relu(self.norm(self.linear(x)))
"""
