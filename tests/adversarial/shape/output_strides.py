"""The result is a transposed view: the values are eager's, the strides are not.

Seen in seven published modules. `fresh_output` compares strides; the caller's `view` or raw pointer would break.
"""

from tests.adversarial.case import Case

CASE = Case(46, "output_strides", "shape", expected="fresh_output", status="closed", seen=("L1",))

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return x @ y

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
        return (y.transpose(-1, -2) @ x.transpose(-1, -2)).transpose(-1, -2)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Transposed inside, restored at the end.'''

    def forward(self, x, y):
        return (y.transpose(-1, -2) @ x.transpose(-1, -2)).transpose(-1, -2).contiguous()
"""
