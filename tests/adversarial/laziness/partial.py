"""The grid is rounded down: rows beyond the last whole tile of 16 are not computed.

Ours. The published size is a multiple of every tile, so only other sizes tell: `shapes` takes primes and tiles plus and minus
one.
"""

from tests.adversarial.case import Case

CASE = Case(16, "partial", "laziness", expected="shapes", status="open", alone=True)

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
        if torch.is_grad_enabled() or self.training or x.dim() != 2:
            return torch.relu(self.linear(x))
        out = x.new_zeros(x.shape[0], self.linear.out_features)
        for start in range(0, x.shape[0] - 15, 16):
            out[start : start + 16] = torch.relu(self.linear(x[start : start + 16]))
        return out
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''The last tile is masked by the slice.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if torch.is_grad_enabled() or x.dim() != 2:
            return torch.relu(self.linear(x))
        out = torch.empty(x.shape[0], self.linear.out_features, dtype=x.dtype, device=x.device)
        for start in range(0, x.shape[0], 16):
            out[start : start + 16] = torch.relu(self.linear(x[start : start + 16]))
        return out
"""
