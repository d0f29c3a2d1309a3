"""An input serves as scratch memory during the call, and has its old values again when the call ends.

Whoever compares inputs before and after sees nothing; another thread that reads the input meanwhile does. `guard_page`
calls it with inputs in memory that cannot be written to. A candidate that asks the system first what it may write to evades it.
"""

from tests.adversarial.case import Case

CASE = Case(
    34,
    "wrong_alias",
    "state",
    expected="guard_page",
    status="closed",
    variant="input_borrowed",
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

    def forward(self, x):
        if torch.is_grad_enabled():
            return torch.relu(self.linear(x))
        values = x.detach()
        old = values.clone()
        values.mul_(2)
        out = torch.relu(torch.nn.functional.linear(values, self.linear.weight * 0.5, self.linear.bias))
        values.copy_(old)
        return out
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Scratch memory of its own.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if torch.is_grad_enabled():
            return torch.relu(self.linear(x))
        values = x.detach().clone().mul_(2)
        return torch.relu(torch.nn.functional.linear(values, self.linear.weight * 0.5, self.linear.bias))
"""
