"""A hook halves the gradient that a parameter accumulates: right by `autograd.grad`, wrong in every loop that calls `backward()`.

Seen as gradient clipping that was left in a module. `grad` asks once by `backward()` and reads the parameters' `grad`. A hook that
only looks at it is right.
"""

from tests.adversarial.case import Case

CASE = Case(
    40,
    "wrong_gradient",
    "autograd",
    expected="grad",
    status="open",
    variant="accumulated",
    alone=False,
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
    return [torch.randn(16, 32)]

def get_init_inputs():
    return [32]
"""

CHEAT = """
import torch
from torch import nn

def halve(parameter):
    parameter.grad.mul_(0.5)

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(halve)

    def forward(self, x):
        return self.linear(x).relu()
"""

HONEST = """
import torch
from torch import nn

def look(parameter):
    assert parameter.grad.shape == parameter.shape

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(look)

    def forward(self, x):
        return self.linear(x).relu()
"""
