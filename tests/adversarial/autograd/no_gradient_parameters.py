"""The gradient of the input is there, those of weight and bias are not: parameters are read through `.data`.

Seen in published modules. `grad` compares the gradient of every floating input and parameter one by one.
"""

from tests.adversarial.case import Case

CASE = Case(
    39,
    "no_gradient",
    "autograd",
    expected="grad",
    status="closed",
    variant="parameters",
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

    def forward(self, x):
        return torch.relu(torch.nn.functional.linear(x, self.linear.weight.data, self.linear.bias.data))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(torch.nn.functional.linear(x, self.linear.weight, self.linear.bias))
"""
