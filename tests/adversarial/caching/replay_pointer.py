"""Results are remembered by the address of the input: new data at an old address gets the old result.

Seen in C++ extensions, where Python sees nothing of it. `call_history` writes new values into the same memory and calls again,
and gives old values at a new address. A key that also holds the version counter is the variant `version`.
"""

from tests.adversarial.case import Case

CASE = Case(
    7,
    "replay_pointer",
    "caching",
    expected="call_history",
    status="closed",
    seen=("GM", "KG", "WF"),
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
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))

        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, stamp(self))
        if key not in self.known:
            self.known[key] = torch.relu(self.linear(x))
        return self.known[key].clone()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Descriptions of tensors are remembered by address; results are computed again.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.descriptors = {}

    def forward(self, x):
        key = (x.data_ptr(), x.shape)
        self.descriptors.setdefault(key, (x.stride(), x.storage_offset()))
        return torch.relu(self.linear(x))
"""
