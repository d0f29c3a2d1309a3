"""The result is detached: training goes on and learns nothing here.

Seen in twelve published modules, usually by a raw operator without registration. `grad` wants `requires_grad` and gradients
wherever eager has them. A candidate that is never offered a gradient is honest.
"""

from tests.adversarial.case import Case

CASE = Case(39, "no_gradient", "autograd", expected="grad", status="closed", seen=("L1",))

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
        with torch.no_grad():
            return torch.relu(self.linear(x))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''A path of its own without gradients, eager's with.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if not torch.is_grad_enabled() and x.dim() == 2:
            return torch.relu(torch.addmm(self.linear.bias, x, self.linear.weight.t()))
        return torch.relu(self.linear(x))
"""
