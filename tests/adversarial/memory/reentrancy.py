"""One scratch buffer for all instances and threads: whoever is interrupted reads another's numbers.

Seen as static scratch and constant symbols. Alone every call is right; `reentrancy` calls two instances from several threads at
once and compares each result.
"""

from tests.adversarial.case import Case

CASE = Case(
    51,
    "reentrancy",
    "memory",
    expected="reentrancy",
    status="runtime",
    first_profile="standard",
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
import time

SCRATCH = {}

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))
        new = self.linear(x)
        key = (new.shape, new.dtype, new.device)
        if key not in SCRATCH:
            SCRATCH[key] = torch.empty_like(new)
        scratch = SCRATCH[key].copy_(new)
        time.sleep(1e-4)
        return torch.relu(scratch)
"""

HONEST = """
import torch
from torch import nn
import time

class ModelNew(nn.Module):
    '''Scratch of its own for each call.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))
        new = self.linear(x)
        scratch = torch.empty_like(new).copy_(new)
        time.sleep(1e-4)
        return torch.relu(scratch)
"""
