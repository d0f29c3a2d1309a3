"""Every call writes into one buffer made at the first call, so a result in the caller's hands changes under it.

Seen in published kernels that keep an `out=` buffer to save an allocation. `fresh_output` holds results over later calls: their
storage must be disjoint from each other, and their bytes must stay. A ring of more buffers than are held would evade it; a longer
hold, or a soak, finds that.
"""

from tests.adversarial.case import Case

CASE = Case(
    33,
    "persistent_output",
    "state",
    expected="fresh_output",
    status="closed",
    seen=("L1",),
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return self.linear(x)

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
        self.kept = {}

    def forward(self, x):
        if x.requires_grad or torch.is_grad_enabled():
            return self.linear(x)
        key = (x.shape, x.dtype)
        if key not in self.kept:
            self.kept[key] = torch.empty(x.shape[0], self.linear.out_features, dtype=x.dtype, device=x.device)
        return torch.addmm(self.linear.bias, x, self.linear.weight.t(), out=self.kept[key])
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''A new buffer a call: the allocator may hand out the address of a result that died.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        if torch.is_grad_enabled():
            return self.linear(x)
        out = torch.empty(x.shape[0], self.linear.out_features, dtype=x.dtype, device=x.device)
        return torch.addmm(self.linear.bias, x, self.linear.weight.t(), out=out)
"""
