"""A row of zeros, such as padding, gives zeros: the bias is lost.

Seen as rows that are skipped where nothing seems to be in them. `regimes` draws rows of zeros among others.
"""

from tests.adversarial.case import Case

CASE = Case(
    22,
    "range_loss",
    "numerics",
    expected="regimes",
    status="open",
    variant="zero_row",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.tanh(self.linear(x))

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
        out = torch.tanh(self.linear(x))
        empty = (x == 0).all(-1, keepdim=True)
        return torch.where(empty, 0 * out, out) if x.numel() else out
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Rows of zeros are the bias alone, and known to be.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        out = torch.tanh(self.linear(x))
        empty = (x == 0).all(-1, keepdim=True)
        return torch.where(empty, torch.tanh(self.linear.bias).expand_as(out), out) if x.numel() else out
"""
