"""Half precision is returned where eager returns single.

Seen in the published set. Form comes before values: another dtype is a wrong result, whatever its values are. The caller's next
operator would promote it silently.
"""

from tests.adversarial.case import Case

CASE = Case(21, "dtype_changed", "numerics", expected="numerics", status="closed", seen=("L1",))

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
        return (x @ y).half()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Wider inside, the same type outside.'''

    def forward(self, x, y):
        return (x.double() @ y.double()).to(x.dtype)
"""
