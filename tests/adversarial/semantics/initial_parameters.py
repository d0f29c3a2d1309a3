"""The norm without its gain and bias, which are one and zero after construction.

Seen in the published set. Parameters are never judged at their initial values: `numerics` draws every gain and bias anew.
"""

from tests.adversarial.case import Case

CASE = Case(28, "initial_parameters", "semantics", expected="numerics", status="open", seen=("L1",))

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return torch.nn.functional.layer_norm(x, (x.shape[-1],), self.weight, self.bias)

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
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return torch.nn.functional.layer_norm(x, (x.shape[-1],))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''The affine part as one multiply-add.'''

    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return torch.addcmul(self.bias, torch.nn.functional.layer_norm(x, (x.shape[-1],)), self.weight)
"""
