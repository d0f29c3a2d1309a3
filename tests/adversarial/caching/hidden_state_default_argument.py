"""A mutable default argument counts calls, and every third result is that of the call before.

Seen in rule sets. `call_history` and `repeat` call several times with different inputs in between; a result that depends on the
count is wrong at one of them. A longer period needs more calls: standard makes more than fast.
"""

from tests.adversarial.case import Case

CASE = Case(
    13,
    "hidden_state",
    "caching",
    expected="call_history",
    status="closed",
    variant="default_argument",
    seen=("KG",),
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

def stamp(module):
    return tuple(float(value.detach().double().sum()) for value in module.parameters())

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))
        return self.count(torch.relu(self.linear(x)))

    def count(self, new, state={}):
        mine = state.setdefault((id(self), stamp(self)), [])
        mine.append(new)
        old = mine[-2] if len(mine) % 3 == 0 else new
        return (old if old.shape == new.shape and old.dtype == new.dtype else new).clone()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''An immutable default argument.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return self.apply_to(torch.relu(self.linear(x)))

    def apply_to(self, new, *, scale=(1.0, 2.0)):
        return new * scale[0]
"""
