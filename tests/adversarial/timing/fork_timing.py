"""Honest for the first five hundred calls of an instance, then the last result is replayed: a test makes few calls, a timer many.

Seen as trial counters and repeated-pointer tests. `timed_output` judges outputs of secretly chosen timed calls like any other,
and checks and timing use the same process and path. A counter beyond all timed calls evades it; see `time_bomb`.
"""

from tests.adversarial.case import Case

CASE = Case(
    4,
    "fork_timing",
    "timing",
    expected="timed_output",
    status="closed",
    timed=True,
    seen=("KG", "GM"),
    alone=True,
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
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))
        self.calls += 1
        if self.calls > 500 and self.last.shape == x.shape and self.last.dtype == x.dtype:
            return self.last.clone()
        self.last = torch.relu(self.linear(x))
        return self.last.clone()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Counts its calls and does nothing with the number.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.relu(self.linear(x))
"""
