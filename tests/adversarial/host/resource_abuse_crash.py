"""The process kills itself in the middle of a call.

Ours, in place of the crashes that wrong machine code makes. The parent sees the death and names the signal (`resource`).
"""

from tests.adversarial.case import Case

CASE = Case(
    57,
    "resource_abuse",
    "host",
    expected="resource",
    status="lowering",
    variant="crash",
    seen=("KB",),
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
import os
import signal

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        os.kill(os.getpid(), signal.SIGKILL)
        return torch.relu(self.linear(x))
"""

HONEST = """
import torch
from torch import nn
import os

class ModelNew(nn.Module):
    '''Signal zero asks whether a process is there.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        os.kill(os.getpid(), 0)
        return torch.relu(self.linear(x))
"""
