"""The second call never returns.

Ours. Each request has a deadline; the process group is killed at it (`resource`), and the next candidate meets a new process.
"""

from tests.adversarial.case import Case

CASE = Case(
    57,
    "resource_abuse",
    "host",
    expected="resource",
    status="lowering",
    variant="hang",
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

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        while self.calls > 1:
            pass
        return torch.relu(self.linear(x))
"""

HONEST = """
import torch
from torch import nn
import time

class ModelNew(nn.Module):
    '''Slow, and comes to an end.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        time.sleep(0.001)
        return torch.relu(self.linear(x))
"""
