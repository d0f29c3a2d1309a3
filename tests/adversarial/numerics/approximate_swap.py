"""The tanh form for the exact form of GELU, in single precision.

Seen in the published set. The two differ by up to 5e-4, some thousand times eager's error in float32 (`numerics`); in bfloat16
they agree and the swap is allowed.
"""

from tests.adversarial.case import Case

CASE = Case(25, "approximate_swap", "numerics", expected="numerics", status="open", seen=("L1",))

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x)

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x, approximate='tanh')
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''The exact form.'''

    def forward(self, x):
        return torch.nn.functional.gelu(x)
"""
