"""The scale is folded into the stored weight at construction: same names, same shapes, other meaning.

Seen in published modules. A state dict of the reference loads without complaint and is then not scaled: `numerics` always loads
parameters of its own. Folding again after each load evades that; see the variant `hook`.
"""

from tests.adversarial.case import Case

CASE = Case(
    36, "same_key_other_meaning", "state", expected="numerics", status="closed", seen=("L1",)
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features, scale):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.scale = scale

    def forward(self, x):
        return self.linear(x) * self.scale

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return [64, 0.5]
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features, scale):
        super().__init__()
        self.linear = nn.Linear(features, features)
        with torch.no_grad():
            self.linear.weight.mul_(scale)
            self.linear.bias.mul_(scale)

    def forward(self, x):
        return self.linear(x)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''The scale in the epilogue.'''

    def __init__(self, features, scale):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.scale = scale

    def forward(self, x):
        return torch.nn.functional.linear(x, self.linear.weight, self.linear.bias).mul(self.scale)
"""
