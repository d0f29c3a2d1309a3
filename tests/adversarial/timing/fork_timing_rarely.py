"""Right for six hundred calls of an instance, and from then on one call in forty answers with the result of the one before.

Two results of a timed batch are judged in full, which would find it in one bucket of twenty. `timed_output` compares all results of a
batch with the judged ones of the same inputs, bit by bit, as far as 20 ms go. A rate of one in ten thousand calls is missed.
"""

from tests.adversarial.case import Case

CASE = Case(
    4,
    "fork_timing",
    "timing",
    expected="timed_output",
    status="closed",
    variant="rarely",
    timed=True,
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
        if self.calls > 600 and self.calls % 40 == 0 and self.last.shape == x.shape and self.last.dtype == x.dtype:
            return self.last.clone()
        self.last = torch.relu(self.linear(x))
        return self.last.clone()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Does something else in one call of forty, and answers rightly.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 600 and self.calls % 40 == 0:
            self.last = None
        return torch.relu(self.linear(x))
"""
