"""The copied weight is made anew when address or version counter of the parameter moves, which is not always.

Ours. `Tensor._version` stays on `p.data.copy_()`, on writes through NumPy, and on `step()` of fused optimisers. `update_path`
uses those too. A checksum of the contents evades it rightly, if it covers every element.
"""

from tests.adversarial.case import Case

CASE = Case(
    35,
    "stale_weight",
    "state",
    expected="update_path",
    status="runtime",
    variant="version",
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
        self.key = self.packed = None

    def forward(self, x):
        if torch.is_grad_enabled() or self.training or x.dim() != 2 or self.linear.weight.is_inference():
            return torch.relu(self.linear(x))
        weight = self.linear.weight
        key = (id(weight), weight.data_ptr(), weight._version, weight.dtype)
        if self.key != key:
            self.key, self.packed = key, weight.detach().clone()
        return torch.relu(torch.nn.functional.linear(x, self.packed, self.linear.bias))
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Notes the version and relies on nothing.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.seen = None

    def forward(self, x):
        weight = self.linear.weight
        self.seen = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        return torch.relu(self.linear(x))
"""
