"""A length as the root of a sum of squares in half precision: squares overflow from 256 on.

Ours. `numerics` draws half-precision inputs up to some hundreds, where eager's hypotenuse is finite.
"""

from tests.adversarial.case import Case

CASE = Case(
    22,
    "range_loss",
    "numerics",
    expected="numerics",
    status="open",
    variant="half",
    first_profile="standard",
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return torch.hypot(x, y)

def get_inputs():
    return [torch.randn(64, 64).half(), torch.randn(64, 64).half()]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, y):
        return torch.sqrt(x * x + y * y)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Wider inside.'''

    def forward(self, x, y):
        return torch.hypot(x, y) if torch.is_grad_enabled() else torch.hypot(x.double(), y.double()).to(x.dtype)
"""
