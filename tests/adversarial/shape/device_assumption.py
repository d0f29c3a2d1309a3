"""The input is moved to the first device, wherever it lies.

Seen in 17 published modules, as `.cuda()` in forward, and as missing device guards in 43 of 45 raw launches. `guard_domain`
calls with tensors on the second device while the first is current.
"""

from tests.adversarial.case import Case

CASE = Case(
    47,
    "device_assumption",
    "shape",
    expected="guard_domain",
    status="runtime",
    needs=("gpu", "two_gpus"),
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
        return torch.sin(x.cuda(0)) * y.cuda(0)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Runs where its tensors lie.'''

    def forward(self, x, y):
        with torch.cuda.device(x.device):
            return torch.sin(x) * y
"""
