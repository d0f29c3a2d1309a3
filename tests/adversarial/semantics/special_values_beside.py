"""One NaN anywhere sends the whole call another way, which leaves out the last row.

Where NaN and infinities lie is right. `special` compares what is finite beside them too, with what eager yields there.
"""

from tests.adversarial.case import Case

CASE = Case(
    30,
    "special_values",
    "semantics",
    expected="special",
    status="open",
    variant="beside",
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1)

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
        if bool(x.isnan().any()):
            return torch.cat([torch.softmax(x[:-1], -1), torch.zeros_like(x[-1:])])
        return torch.softmax(x, -1)
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''Goes another way for a NaN, to the same results.'''

    def forward(self, x):
        if bool(x.isnan().any()):
            return torch.cat([torch.softmax(x[:-1], -1), torch.softmax(x[-1:], -1)])
        return torch.softmax(x, -1)
"""
