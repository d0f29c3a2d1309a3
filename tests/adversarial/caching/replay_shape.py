"""The first result of each shape is remembered and returned for every later input of that shape.

Seen in published kernels and in rule sets. `call_history` calls with A, then with new values of the same shape under the same
weights: the second result must be the second input's. Keying the cache by values as well evades it; see `replay_value`.
"""

from tests.adversarial.case import Case

CASE = Case(
    8,
    "replay_shape",
    "caching",
    expected="call_history",
    status="closed",
    alone=True,
    seen=("L1", "KG"),
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
        self.known = {}

    def forward(self, x):
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))
        key = (x.shape, x.stride(), x.dtype, stamp(self))
        if key not in self.known:
            self.known[key] = torch.relu(self.linear(x))
        return self.known[key].clone()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''What is remembered by shape is a plan (how to split the rows), never a result.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.plans = {}

    def forward(self, x):
        rows = x.shape[0] if x.dim() == 2 else 0
        plan = self.plans.setdefault(x.shape, [rows // 2, rows - rows // 2] if rows > 1 else None)
        if plan is None:
            return torch.relu(self.linear(x))
        return torch.cat([torch.relu(self.linear(part)) for part in x.split(plan)])
"""
