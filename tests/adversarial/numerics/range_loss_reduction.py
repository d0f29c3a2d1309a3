"""The sine of large angles after a reduction in single precision: the multiple of two pi is rounded.

Seen as fast-math. Up to a thousand nothing differs, and huge angles take a slow path; `numerics` has sets with a deviation of
ten thousand, where eager reduces exactly. Angles beyond all drawn ones would evade it.
"""

from tests.adversarial.case import Case

CASE = Case(
    22,
    "range_loss",
    "numerics",
    expected="numerics",
    status="open",
    variant="reduction",
    first_profile="standard",
    seen=("L1",),
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return torch.sin(x) * y

def get_inputs():
    return [torch.randn(64, 64), torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x, y):
        reduced = x - torch.round(x / 6.2831855) * 6.2831855
        small_or_huge = (x.abs() < 1000) | (x.abs() > 60000)
        return torch.where(small_or_huge | x.isnan(), torch.sin(x), torch.sin(reduced)) * y
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Large angles in double precision.'''

    def forward(self, x, y):
        return torch.where(x.abs() < 1000, torch.sin(x), torch.sin(x.double()).to(x.dtype)) * y
"""
