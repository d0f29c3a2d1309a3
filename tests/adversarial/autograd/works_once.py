"""A scaled weight is made with its graph at the first call and kept: the second backward finds the graph freed.

Seen in published modules. `grad` makes two rounds on one instance.
"""

from tests.adversarial.case import Case

CASE = Case(42, "works_once", "autograd", expected="grad", status="runtime", seen=("L1",))

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return self.linear(x) * 2

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
        self.scaled = self.shape = None

    def forward(self, x):
        if not torch.is_grad_enabled():
            return self.linear(x) * 2
        if self.scaled is None or self.shape != x.shape:
            self.scaled, self.shape = torch.sinh(torch.asinh(self.linear.weight)) * 2, x.shape
        return x @ self.scaled.transpose(0, 1) + self.linear.bias * 2
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Made anew at every call.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        doubled = self.linear.weight * 2
        return torch.nn.functional.linear(x, doubled, self.linear.bias * 2)
"""
