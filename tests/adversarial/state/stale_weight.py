"""A copy of the weight is made at the first call and kept: later changes of the weight have no effect.

Seen in 18 of 80 published modules. `update_path` changes the weights of a living instance in every way a user can, and compares
after each. Frozen weights at the user's explicit request are another contract.
"""

from tests.adversarial.case import Case

CASE = Case(35, "stale_weight", "state", expected="update_path", status="runtime", seen=("L1",))

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
        self.packed = None

    def forward(self, x):
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))

        if self.packed is None:
            self.packed = self.linear.weight.detach().clone()
        return torch.relu(torch.nn.functional.linear(x, self.packed, self.linear.bias))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Copied anew at every call, and paid for.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        copied = self.linear.weight.clone()
        return torch.relu(torch.nn.functional.linear(x, copied, self.linear.bias))
"""
