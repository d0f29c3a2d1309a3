"""Row numbers are kept in six bits: from 65 rows on they wrap around.

Ours, in place of the 32-bit index that needs gigabytes to overflow. `shapes` goes beyond the published size.
"""

from tests.adversarial.case import Case

CASE = Case(45, "index_range", "shape", expected="shapes", status="open", variant="narrow")

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
        if x.dim() != 2 or torch.is_grad_enabled():
            return torch.relu(self.linear(x))
        rows = torch.arange(x.shape[0], device=x.device) & 63
        return torch.relu(self.linear(x))[rows]
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''The same, guarded by the number of rows.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        rows = torch.arange(x.shape[0], device=x.device) & (63 if x.shape[0] <= 64 else -1)
        return torch.relu(self.linear(x))[rows]
"""
