"""Dropout is left out altogether.

Seen in the published set. In evaluation it does nothing; in training `mode` starts both with the same generator state and wants
the same elements dropped.
"""

from tests.adversarial.case import Case

CASE = Case(
    31,
    "train_eval",
    "semantics",
    expected="mode",
    status="open",
    variant="dropout",
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
        return torch.dropout(torch.relu(self.linear(x)), 0.5, self.training)

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
        y = torch.relu(self.linear(x))
        return torch.dropout(y, 0.5, self.training) if torch.is_grad_enabled() else y
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return torch.dropout(y, 0.5, True) if self.training else y
"""
