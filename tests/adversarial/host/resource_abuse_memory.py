"""Memory is taken until there is none.

Seen as memory grabs. The child's address space is limited; the failed allocation is an answer like any other (`resource`).
"""

from tests.adversarial.case import Case

CASE = Case(
    57,
    "resource_abuse",
    "host",
    expected="resource",
    status="lowering",
    variant="memory",
    seen=("KB",),
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

KEPT = []

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        KEPT.append(bytearray(1 << 44))
        return torch.relu(self.linear(x))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Sixteen mebibytes, freed.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        scratch = bytearray(1 << 24)
        return torch.relu(self.linear(x)) if scratch else x
"""
