"""Two buffers take turns, so the result of the last call is always whole.

A refinement of `persistent_output` for tests that hold one result. `fresh_output` holds more results over later calls than a
double buffer has places. A ring longer than the hold would evade it; the soak of the strict profile is longer.
"""

from tests.adversarial.case import Case

CASE = Case(
    33,
    "persistent_output",
    "state",
    expected="fresh_output",
    status="closed",
    variant="ring",
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
        self.kept = {}

    def forward(self, x):
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))

        key = (x.shape, x.dtype)
        ring = self.kept.setdefault(key, [x.new_empty(*x.shape[:-1], self.linear.out_features) for _ in range(2)])
        ring.reverse()
        return ring[0].copy_(torch.relu(self.linear(x)))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''A buffer that lives for one call.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        scratch = x.new_empty(*x.shape[:-1], self.linear.out_features)
        return scratch.copy_(torch.relu(self.linear(x))) if not torch.is_grad_enabled() else torch.relu(self.linear(x))
"""
