"""The input is rectified in place and then used: the caller finds it changed.

Seen in three of a random 46 published kernels. The result is right, also the second time; `fresh_output` compares the bytes of
every input before and after.
"""

from tests.adversarial.case import Case

CASE = Case(
    34,
    "wrong_alias",
    "state",
    expected="fresh_output",
    status="open",
    variant="input_written",
    seen=("L1",),
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return torch.relu(x) @ y

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
        if x.requires_grad:
            return torch.relu(x) @ y
        return x.relu_() @ y
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''In place on a copy of one's own.'''

    def forward(self, x, y):
        if torch.is_grad_enabled():
            return torch.relu(x) @ y
        own = x.clone()
        return own.relu_() @ y
"""
