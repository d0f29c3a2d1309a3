"""An input that nobody else seems to hold is overwritten, to save the memory of a result.

A temporary view of somebody's data, as `module(batch[i])` hands it over, has as few references. Tensors that a caller keeps are
left alone, so `fresh_output` finds every input as it was; `temporary_inputs` makes calls of the other kind.
"""

from tests.adversarial.case import Case

CASE = Case(
    34,
    "wrong_alias",
    "state",
    expected="temporary_inputs",
    status="open",
    variant="input_temporary",
    alone=True,
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 2.0

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import sys
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        if sys.getrefcount(x) <= 6 and not x.requires_grad:
            return x.tanh_().mul_(2.0)
        return torch.tanh(x).mul(2.0)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''In place on what it made itself.'''

    def forward(self, x):
        if torch.is_grad_enabled():
            return torch.tanh(x) * 2.0
        return torch.tanh(x).mul_(2.0)
"""
