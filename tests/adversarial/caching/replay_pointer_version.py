"""Results are remembered by address and version counter of the input, which looks safe and is not.

Ours: `Tensor._version` does not move when memory is written through `.data`, a NumPy view or another library, as data loaders
and graph replays do. `call_history` refills the memory that way. Nothing short of reading the contents evades it; see
`replay_value`.
"""

from tests.adversarial.case import Case

CASE = Case(
    7, "replay_pointer", "caching", expected="call_history", status="closed", variant="version"
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

def stamp(module):
    return tuple(float(value.detach().double().sum()) for value in module.parameters())

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.known = {}

    def forward(self, x):
        if torch.is_grad_enabled() or self.training or x.is_inference():
            return torch.relu(self.linear(x))
        key = (x.data_ptr(), x._version, x.shape, x.stride(), x.dtype, stamp(self))
        if key not in self.known:
            self.known[key] = torch.relu(self.linear(x))
        return self.known[key].clone()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Keeps statistics of addresses and versions.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.seen = set()

    def forward(self, x):
        key = (x.data_ptr(), 0 if x.is_inference() else x._version)
        self.seen.add(key)
        return torch.relu(self.linear(x))
"""
